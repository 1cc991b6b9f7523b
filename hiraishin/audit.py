"""The audit: does a batch change this model's greedy output in this build, from which width, and which operation?

Controls come first (the same width twice, width 1 replayed, watching on against off); then the replay, width
classes that give the same bits, one localized width a class, a noise floor, and a verdict with an exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiraishin.builds import Build, describe_library, find_build
from hiraishin.errors import NativeCrash, UserError
from hiraishin.judge import judge_nature, spell_classes, width_classes
from hiraishin.models import ModelFile, check_file, embedded, sha256_file
from hiraishin.prompts import Prompt, load_prompts, select
from hiraishin.worker import Worker

EXACT, DIFFERS, UNKNOWN = 0, 1, 2
"""Exit codes: every row equal; some row differs; could not tell."""

Echo = Callable[[str], None]


@dataclass(frozen=True)
class AuditOptions:
    """What to audit. ``lib`` is any llama.cpp build's library folder; else ``build`` names one of ours.

    A build whose description lists patches is audited with its switch on.
    """

    lib: Path | None = None
    build: str = "stock"
    model: Path | None = None
    quant: str = "Q4_K_M"
    widths: tuple[int, ...] = tuple(range(2, 17))
    tokens: int = 128
    prompt: str = "first"
    prompt_set: str = "replay"
    kv_type: str = "f16"
    threads: int = 2
    flash_attn: bool = True
    gpu_layers: int = 0
    explain: bool = False
    predict: bool = False
    prompt_tokens: int | None = None
    """Take only the first so many tokens of the prompt, so that the trace starts at a chosen KV position."""

    def settings(self) -> dict[str, Any]:
        """How the contexts are made."""
        return {
            "threads": self.threads,
            "kv_type": self.kv_type,
            "flash_attn": self.flash_attn,
            "gpu_layers": self.gpu_layers,
            "n_batch": 512,
            "extra_bufts": True,
        }


@dataclass
class AuditReport:
    """What the audit found. ``exit_code`` is 0 exact, 1 not exact, 2 could not tell."""

    exit_code: int
    verdict: str
    about: dict[str, Any]
    controls: dict[str, Any]
    widths: list[dict[str, Any]] = field(default_factory=list)
    classes: list[list[int]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    floor: dict[str, Any] = field(default_factory=dict)
    nature: str = ""
    causes: list[dict[str, Any]] = field(default_factory=list)
    prediction: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__}


def _build(options: AuditOptions) -> tuple[Build, int]:
    if options.lib is not None:
        build = describe_library(options.lib)
        return build, 16 if build.description.get("patches") else 0
    if options.build not in ("stock", "patched"):
        raise UserError(f"there is no build {options.build!r}", "stock or patched; or --lib with a folder.")
    build = find_build(options.build)
    return build, 16 if options.build == "patched" else 0


def _model(options: AuditOptions, echo: Echo) -> ModelFile:
    if options.model is None:
        return embedded(options.quant, echo=echo)
    check_file(options.model)
    return ModelFile(options.model.resolve(), options.model.stem, "as given", sha256_file(options.model))


def _replay(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    switch: int,
    prompt: list[int],
    options: AuditOptions,
    widths: list[int],
) -> Iterator[dict[str, Any]]:
    yield from worker.call(
        "hiraishin.replay:measure",
        model_path=str(model.path),
        settings=settings,
        switch=switch,
        parts_off=0,
        prompt=prompt,
        tokens=options.tokens,
        widths=widths,
    )


def run_audit(options: AuditOptions, echo: Echo = print) -> AuditReport:
    """Run the audit and give its report.

    Raises:
        UserError: the library or model cannot be used (exit code 2).
    """
    build, switch = _build(options)
    model = _model(options, echo)
    chosen = select(load_prompts(options.prompt_set), [options.prompt])[0]
    settings = options.settings()
    with Worker(build) as worker:
        reply = worker.result("hiraishin.llama:tokenize_prompts", model_path=str(model.path), texts=[chosen.text])
        tokens: list[int] = reply["tokens"][0][: options.prompt_tokens]
        if reply["n_ctx_train"] and len(tokens) + options.tokens > reply["n_ctx_train"]:
            raise UserError(
                f"prompt and tokens do not fit in the model's context of {reply['n_ctx_train']}", "Use --tokens."
            )
        about = _about(options, build, model, chosen, len(tokens), switch, worker)
        report = AuditReport(UNKNOWN, "", about, {})
        if options.predict:
            from hiraishin.dispatch import predict

            report.prediction = predict(
                worker, model, settings, len(tokens), options.tokens, list(options.widths), switch=switch
            )
        traced = _replays(worker, model, settings, switch, tokens, options, report, echo)
        _floor(worker, model, settings, tokens, traced, report, echo)
        _localize(worker, model, settings, switch, tokens, options, report, echo)
    _verdict(report, options)
    if options.explain and report.exit_code == DIFFERS:
        from hiraishin.explain import explain

        report.causes = explain(options, build, model, tokens, switch, report, echo)
    if report.prediction:
        from hiraishin.dispatch import score

        firsts = {e["width"]: e["first_differing_kv"] for e in report.widths}
        report.prediction["score"] = score(report.prediction, report.classes, firsts)
    return report


def _about(
    options: AuditOptions, build: Build, model: ModelFile, prompt: Prompt, length: int, switch: int, worker: Worker
) -> dict[str, Any]:
    return {
        "build": build.name,
        "backend": build.backend,
        "fingerprint": build.fingerprint,
        "upstream_commit": build.description.get("upstream_commit"),
        "libraries": worker.libraries,
        "switch": switch,
        "model": model.name,
        "quant": model.quant,
        "model_sha256": model.sha256,
        "prompt": prompt.id,
        "prompt_tokens": length,
        "tokens": options.tokens,
        **options.settings(),
    }


def _replays(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    switch: int,
    prompt: list[int],
    options: AuditOptions,
    report: AuditReport,
    echo: Echo,
) -> dict[str, Any]:
    hashes: dict[int, tuple[str, ...]] = {}
    trace: dict[str, Any] = {}
    for event in _replay(worker, model, settings, switch, prompt, options, [1, *options.widths]):
        if event.get("kind") == "trace":
            trace = event["table"]
            hashes[1] = tuple(trace["row_sha256"])
        elif event.get("kind") == "replay":
            width, record, table = event["width"], event["record"], event["table"]
            if width == 1:
                report.controls["width1_differing_rows"] = record["differing"]
                report.controls["width1_rerun_differing_rows"] = record["rerun_differing"]
                continue
            hashes[width] = tuple(table["row_sha256"])
            entry = {
                k: record[k]
                for k in ("positions", "differing", "first_differing", "first_differing_kv", "max_abs_diff", "flips")
            }
            entry |= {"width": width, "rerun_differing": record["rerun_differing"]}
            moved = [i for i, d in enumerate(table["differing"]) if d]
            entry["rms"] = [table["rms_diff"][i] for i in moved]
            # None (not finite) is worse than any number.
            entry["worst"] = max(
                moved, key=lambda i: (table["rms_diff"][i] is None, table["rms_diff"][i] or 0), default=None
            )
            entry["flip_list"] = [
                [table["margin"][i], table["max_abs_diff"][i]] for i, f in enumerate(table["flip"]) if f
            ]
            report.widths.append(entry)
            echo(f"width {width:>2}: {record['differing']} of {record['positions']} rows differ")
    report.controls["rerun_differing_rows"] = sum(e["rerun_differing"] for e in report.widths)
    report.classes = width_classes(hashes)
    return trace


def _floor(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    prompt: list[int],
    trace: dict[str, Any],
    report: AuditReport,
    echo: Echo,
) -> None:
    """The first known reordering that moves anything here: no repack, then one thread, then attention the other way."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("weights not repacked", {"extra_bufts": False}),
        ("one thread", {"threads": 1}),
    ]
    if settings["kv_type"] in ("f16", "f32", "bf16"):
        changes.append(
            (f"flash attention {'off' if settings['flash_attn'] else 'on'}", {"flash_attn": not settings["flash_attn"]})
        )
    for name, change in changes:
        try:
            measured = worker.result(
                "hiraishin.replay:reorder_floor",
                model_path=str(model.path),
                settings=settings,
                changes=change,
                prompt=prompt,
                tokens=list(trace["token"])[:64],
            )
        except NativeCrash:
            raise
        except UserError as error:
            echo(f"the noise floor by {name} cannot be measured: {error.what}")
            continue
        if measured["differing"]:
            report.floor = {"by": name, **measured}
            return
    report.floor = {"by": "", "differing": 0, "rms_max": 0.0}


def _localize(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    switch: int,
    prompt: list[int],
    options: AuditOptions,
    report: AuditReport,
    echo: Echo,
) -> None:
    wrong = {e["width"]: e for e in report.widths if e["differing"]}
    report.controls["watching_changed_rows"] = None
    targets = [next((w for w in c if w in wrong), None) for c in report.classes]
    if not wrong and options.widths:
        targets = [options.widths[-1]]  # nothing differs: still show that watching finds nothing
    changed = 0
    for width in dict.fromkeys(t for t in targets if t is not None):
        echo(f"watching the operations of a pass of {width} tokens")
        first = _watched(worker, model, settings, switch, prompt, options, width, None)
        report.operations.append(first)
        changed += first["watching_changed_rows"]
        # Where the rows move most may be another pass, for another reason.
        worst = wrong[width]["worst"] // width * width if width in wrong else first["position"]
        if worst != first["position"] and worst + width <= options.tokens:
            again = _watched(worker, model, settings, switch, prompt, options, width, worst)
            first["worst_pass"] = again
            changed += again["watching_changed_rows"]
    report.controls["watching_changed_rows"] = changed


def _watched(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    switch: int,
    prompt: list[int],
    options: AuditOptions,
    width: int,
    start: int | None,
) -> dict[str, Any]:
    """One pass, watched: its first origin, how many there are, their kinds, and the largest relative size of one."""
    for event in worker.call(
        "hiraishin.localize:measure",
        model_path=str(model.path),
        settings=settings,
        switch=switch,
        parts_off=0,
        prompt=prompt,
        tokens=options.tokens,
        width=width,
        start=start,
    ):
        if event.get("kind") == "localize":
            record: dict[str, Any] = event["record"]
    origins = record["origins"]
    kinds = sorted({(o["op"], o["weight_type"], o["switch"]) for o in origins})
    return {
        "width": width,
        "position": record["position"],
        "kv_position": record["kv_position"],
        "operations": record["operations"],
        "watching_changed_rows": record["watching_changed_rows"],
        "first": origins[0] if origins else None,
        "origins": len(origins),
        "largest_share": max((o["relative"] for o in origins if o["relative"] is not None), default=None),
        "kinds": [{"op": op, "weight_type": kind, "switch": switch_} for op, kind, switch_ in kinds],
    }


def _verdict(report: AuditReport, options: AuditOptions) -> None:
    about = report.about
    how = (
        f"{about['model']} {about['quant']}, KV {about['kv_type']}, flash attention {'on' if about['flash_attn'] else 'off'}, "
        f"{about['threads']} thread(s), context {about['prompt_tokens']} to {about['prompt_tokens'] + about['tokens']}"
    )
    noise = [k for k, v in report.controls.items() if v]
    wrong = [e for e in report.widths if e["differing"]]
    rms = [value for e in wrong for value in e["rms"]]
    flips = [(m, d) for e in wrong for m, d in e["flip_list"]]
    watched = [*report.operations, *(o["worst_pass"] for o in report.operations if "worst_pass" in o)]
    shares = [o["largest_share"] for o in watched if o["largest_share"] is not None]
    report.nature = judge_nature(rms, report.floor, flips, shares)
    if noise:
        report.exit_code = UNKNOWN
        report.verdict = (
            f"could not tell: the control {noise[0]} is not zero, so a difference would prove nothing ({how})"
        )
    elif not wrong:
        report.exit_code = EXACT
        report.verdict = f"exact to {about['tokens']} positions at widths {_span(options.widths)} ({how})"
    else:
        report.exit_code = DIFFERS
        first = min(wrong, key=lambda e: e["width"])
        op = next((o["first"] for o in report.operations if o["width"] == first["width"]), None)
        because = (
            f" because of {op['tensor']} ({op['op']}, {op['weight_type']}{'; ' + op['switch'] if op['switch'] else ''})"
            if op
            else ""
        )
        what = {"rounding": "reordered sums", "logic": "a logic error, not rounding", "unknown": "of unknown nature"}[
            report.nature
        ]
        report.verdict = f"not exact, from width {first['width']}{because}; differences look like {what} ({how})"


def _span(widths: tuple[int, ...]) -> str:
    return spell_classes([sorted(widths)])[1:-1]
