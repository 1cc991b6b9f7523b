"""The ladder: the hunt's causes treated one after the other, and what is left at each step, width by width.

A step is a set of parts of the patches that were left out (a result's build label names them). Only replays of one trace
under one setting stand in one ladder, at the widths that every step of it was replayed at, so rows compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hiraishin.report.facts import format_number

HUNT: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("", "stock", frozenset({"cuda-attention-8", "cuda-mul-mat", "cuda-attention-16", "cuda-parallel-blocks"})),
    (
        "cuda-attention-8",
        "attention 8",
        frozenset({"cuda-mul-mat", "cuda-attention-16", "cuda-parallel-blocks"}),
    ),
    ("cuda-mul-mat", "+ mat-vec", frozenset({"cuda-attention-16", "cuda-parallel-blocks"})),
    ("cuda-attention-16", "+ attention 16", frozenset({"cuda-parallel-blocks"})),
    ("cuda-parallel-blocks", "+ parallel blocks", frozenset()),
)
"""Steps in the order of the hunt: the part that is added, what the row is called, the parts still left out."""

_PREFIX = "patched-without-"
_TRACE = (
    "model_sha256",
    "prompt_sha256",
    "prompt",
    "prompt_tokens",
    "tokens",
    "quant",
    "kv_type",
    "flash_attn",
    "threads",
    "env",
)
OFF = "switch off"
"""The patched build with its switch off, which is stock; a ladder without stock starts with it."""

FEWEST_STEPS = 2
"""Steps between stock and all treated that make a ladder."""


@dataclass(frozen=True)
class Rung:
    """One row: what is treated, with or without the guard (``None``: neither, on stock), and what is left."""

    treated: str
    guard: bool | None
    largest: list[Markup | str]
    compared: Markup
    differing: Markup
    first: Markup | str
    flips: Markup


@dataclass(frozen=True)
class Ladder:
    """One trace's ladder: the widths of its columns, its rungs from stock to all treated, and a setting to tell it by."""

    widths: list[int]
    rungs: list[Rung]
    prompt: str
    context: tuple[int, int]
    setting: str

    @property
    def span(self) -> Markup:
        """First and last KV position replayed, as an element."""
        return Markup(
            '<data class="claim" value="{}" data-claim="ladder.context" data-param="kv">{} to {}</data>'
        ).format(self.context[1], *(format_number(n) for n in self.context))


def left_out(build: str) -> frozenset[str] | None:
    """The parts that a result's build label leaves out; ``None`` for labels that are no step (serial mode)."""
    if build == "patched":
        return frozenset()
    return frozenset(build.removeprefix(_PREFIX).split("+")) if build.startswith(_PREFIX) else None


def ladders(results: Any) -> list[Ladder]:
    """Every ladder in a result set, this GPU as it is before those that pretend to be another."""
    groups: dict[tuple[Any, ...], dict[tuple[str, bool | None], dict[int, Any]]] = {}
    for r in results.of("replay"):
        width, step = int(r.inputs.get("width") or 0), _step(str(r.inputs.get("build", "")))
        if width > 1 and step is not None:
            key = tuple(r.inputs.get(k) for k in _TRACE)
            groups.setdefault(key, {}).setdefault(step, {})[width] = r
    made = []
    for key, steps in sorted(groups.items(), key=lambda g: (g[0][-1] is not None, str(g[0]))):
        if (HUNT[0][1], None) in steps:
            steps.pop((OFF, None), None)
        between = [s for s in steps if s[0] not in (HUNT[0][1], OFF, HUNT[-1][1])]
        if len(between) >= FEWEST_STEPS:
            made.append(_ladder(dict(zip(_TRACE, key, strict=True)), steps))
    return [ladder for ladder in made if ladder.rungs]


def _step(build: str) -> tuple[str, bool | None] | None:
    if build in ("stock", "patched-off"):
        return (HUNT[0][1] if build == "stock" else OFF), None
    parts = left_out(build)
    if parts is None:
        return None
    for _, name, left in HUNT[1:]:
        if parts - {"guard"} == left:
            return name, "guard" not in parts
    return None


def _ladder(about: Mapping[str, Any], steps: Mapping[tuple[str, bool | None], Mapping[int, Any]]) -> Ladder:
    widths = sorted(set.intersection(*(set(by_width) for by_width in steps.values())))
    names = [HUNT[0][1], OFF, *(name for _, name, _ in HUNT[1:])]
    order = [(name, guard) for name in names for guard in (None, False, True) if (name, guard) in steps]
    rungs = [_rung(name, guard, [steps[name, guard][w] for w in widths]) for name, guard in order] if widths else []
    reached = [int(r.table["kv_position"].max()) for by in steps.values() for r in by.values() if _has_rows(r)]
    starts = [int(r.table["kv_position"].min()) for by in steps.values() for r in by.values() if _has_rows(r)]
    return Ladder(
        widths,
        rungs,
        str(about.get("prompt") or ""),
        (min(starts, default=0), max(reached, default=0)),
        str(about.get("env") or ""),
    )


def _has_rows(result: Any) -> bool:
    return result.table is not None and len(result.table) > 0


def _rung(name: str, guard: bool | None, results: Sequence[Any]) -> Rung:
    places = [r.record["first_differing_kv"] for r in results if r.record.get("first_differing_kv") is not None]
    return Rung(
        name,
        guard,
        [_number(r.record.get("max_abs_diff"), "max_abs_diff", [r]) for r in results],
        _number(sum(int(r.record["positions"]) for r in results), "compared", results),
        _number(sum(int(r.record["differing"]) for r in results), "differing", results),
        _number(min(places), "first_differing_kv", results) if places else "none",
        _number(sum(int(r.record["flips"]) for r in results), "flips", results),
    )


def _number(value: float | int | None, name: str, results: Iterable[Any]) -> Markup:
    keys = " ".join(r.key[:12] for r in results)
    return Markup('<data class="claim" value="{}" data-claim="ladder.{}" data-result="{}">{}</data>').format(
        "" if value is None else value, name, keys, format_number(value)
    )
