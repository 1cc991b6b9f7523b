"""Audits in receipts: what one command said of a build, a model and a card, and whether that was predicted before it ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hiraishin.audit_receipt import KIND, as_report
from hiraishin.errors import UserError
from hiraishin.judge import spell_classes
from hiraishin.report.facts import format_number

if TYPE_CHECKING:
    from hiraishin.audit import AuditReport
    from hiraishin.results import Result, ResultSet

NATURE = {"none": "", "rounding": "reordered sums", "logic": "a logic error", "unknown": "unknown"}
_CONTROLS = {
    "width1_differing_rows": "width 1 replayed",
    "width1_rerun_differing_rows": "width 1 twice",
    "rerun_differing_rows": "every width twice",
    "watching_changed_rows": "watching",
}


@dataclass(frozen=True)
class Cause:
    """A switch that removes one cause: the widths where no row differs with it, those where some still do."""

    control: str
    gone: list[int]
    stays: list[int]
    not_possible: str = ""


@dataclass(frozen=True)
class Audit:
    """One audit, as a table shows it. ``operations`` maps a watched width to the first operation that starts a difference."""

    build: str
    model: str
    setting: str
    verdict: str
    classes: str
    predicted: str
    right: bool | None
    why: str
    rows: int
    differing: int
    first_kv: int | None
    operations: dict[int, str]
    unfused: dict[int, int]
    nature: str
    noise: list[str]
    causes: list[Cause]
    key: str

    @property
    def widths_by_operation(self) -> dict[str, str]:
        """Each first operation once: the watched widths where a difference starts in it, in words."""
        found: dict[str, list[int]] = {}
        for width, operation in self.operations.items():
            found.setdefault(operation, []).append(width)
        return {", ".join(map(str, widths)): operation for operation, widths in found.items()}

    def number(self, name: str) -> Markup:
        """``rows``, ``differing`` or ``first_kv`` as an element that names the result."""
        value = getattr(self, name)
        return Markup('<data class="claim" value="{}" data-claim="audit.{}" data-result="{}">{}</data>').format(
            "" if value is None else value, name, self.key[:12], format_number(value)
        )


def audits(results: ResultSet) -> list[Audit]:
    """Every audit that can be read, stock before patched, model by model."""
    found = []
    for result in results.of(KIND):
        try:
            found.append(_audit(result, as_report(result)))
        except (UserError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # another version's, or not an audit at all: the provenance page counts its unit
    return sorted(found, key=lambda a: (a.model, a.setting, a.build != "stock", a.build))


def predicted_right(found: Sequence[Audit]) -> tuple[int, int]:
    """How many audits came with a prediction, and of how many the width classes were right."""
    with_one = [a for a in found if a.right is not None]
    return sum(bool(a.right) for a in with_one), len(with_one)


def _audit(result: Result, report: AuditReport) -> Audit:
    about, prediction = report.about, report.prediction
    flash = "flash attention" if about["flash_attn"] else "no flash attention"
    start, end = int(about["prompt_tokens"]), int(about["prompt_tokens"]) + int(about["tokens"])
    firsts = [_count(e["first_differing_kv"]) for e in report.widths if e["first_differing_kv"] is not None]
    return Audit(
        build=str(about["build"]),
        model=_model(str(about["model"]), str(about["quant"])),
        setting=f"{about['kv_type']} KV, {flash}, positions {start} to {end}",
        verdict=report.verdict,
        classes=spell_classes(report.classes),
        predicted=spell_classes(prediction["classes"]) if prediction else "",
        right=bool(prediction["score"]["classes_right"]) if prediction.get("classes") else None,
        why="; ".join(map(str, prediction.get("why", ()))),
        rows=sum(_count(e["positions"]) for e in report.widths),
        differing=sum(_count(e["differing"]) for e in report.widths),
        first_kv=min(firsts, default=None),
        operations={int(o["width"]): _operation(o["first"]) for o in report.operations},
        unfused={int(e["width"]): int(e["differing"]) for e in report.unfused},
        nature=NATURE[report.nature],
        noise=[_CONTROLS.get(name, name) for name, value in report.controls.items() if value],
        causes=[_cause(c) for c in report.causes],
        key=result.key,
    )


def _count(value: Any) -> int:
    """A count as a stored audit has it; what no count can be is an audit that cannot be read."""
    number = int(value)
    if not 0 <= number < 1 << 53:
        raise ValueError("no count")
    return number


def _model(name: str, quant: str) -> str:
    """Model and weight type; a file given by its path has the type in its name."""
    return name if quant == "as given" else f"{name} {quant}"


def _operation(first: dict[str, Any] | None) -> str:
    if first is None:
        return "none"
    kind = f" {first['weight_type']}" if first.get("weight_type") else ""
    return f"{first['op']}{kind} ({first['tensor']})"


def _cause(cause: dict[str, Any]) -> Cause:
    after = cause["after"]
    if after is None:
        return Cause(str(cause["control"]), [], [], str(cause["finding"]))
    widths = sorted((int(width), int(rows)) for width, rows in after.items())
    return Cause(str(cause["control"]), [w for w, n in widths if n == 0], [w for w, n in widths if n])


def gone_words(causes: Iterable[Cause]) -> list[str]:
    """Switches that took the difference away, each with its widths: for a line of text."""
    return [f"{c.control} at {', '.join(map(str, c.gone))}" for c in causes if c.gone]
