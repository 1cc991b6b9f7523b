"""The audit: does a batch change this model's greedy output in this build, from which width, and which operation?

Controls come first (the same width twice, width 1 replayed, watching on against off); then the replay, width
classes that give the same bits, one localized width a class, a noise floor, and a verdict with an exit code.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiraishin import provenance
from hiraishin.audit_steps import (
    Echo,
    Job,
    measure_floor,
    patient,
    replay,
    replay_unfused,
    watch_operations,
)
from hiraishin.builds import Build, describe_library, find_build
from hiraishin.errors import UserError
from hiraishin.gguf_header import read_header
from hiraishin.judge import judge_nature, spell_classes
from hiraishin.models import ModelFile, check_file, embedded, sha256_file
from hiraishin.prompts import Prompt, load_prompts, select
from hiraishin.tasks import UNFUSED
from hiraishin.worker import Worker

EXACT, DIFFERS, UNKNOWN = 0, 1, 2
"""Exit codes: every row equal; some row differs; could not tell."""
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""What llama.cpp keeps keys and values in."""


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
    unfused: list[dict[str, Any]] = field(default_factory=list)
    """On a GPU: the watched widths replayed without CUDA fusion, where their operations were watched."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: keys are text, and a number that is not finite is null."""
        plain: dict[str, Any] = _finite(
            json.loads(json.dumps({k: getattr(self, k) for k in self.__dataclass_fields__}))
        )
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_options(options: AuditOptions) -> None:
    """Refuse what would end in a verdict on nothing, or in the middle of native code."""
    if not [width for width in options.widths if width > 1]:
        raise UserError(
            "there is no width to audit: a pass of one token is what the others are compared with", "Use --widths."
        )
    if max(options.widths) > options.tokens:
        raise UserError(
            f"a pass of {max(options.widths)} tokens does not fit in a trace of {options.tokens}",
            "Use more --tokens, or narrower --widths.",
        )
    if options.kv_type not in CACHE_TYPES:
        raise UserError(f"there is no KV type {options.kv_type!r}", f"Known: {', '.join(CACHE_TYPES)}.")


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


def run_audit(options: AuditOptions, echo: Echo = print) -> AuditReport:
    """Run the audit and give its report.

    Raises:
        UserError: the library or model cannot be used (exit code 2).
    """
    _check_options(options)
    build, switch = _build(options)
    model = _model(options, echo)
    chosen = select(load_prompts(options.prompt_set), [options.prompt])[0]
    settings = options.settings()
    with Worker(build, patient()) as worker:
        _check_gpu(worker, build, options, echo)
        reply = worker.result("hiraishin.llama:tokenize_prompts", model_path=str(model.path), texts=[chosen.text])
        tokens: list[int] = reply["tokens"][0][: options.prompt_tokens]
        limit = read_header(model.path).n_ctx_train  # a load of the vocabulary alone knows no context
        if limit and len(tokens) + options.tokens > limit:
            raise UserError(f"prompt and tokens do not fit in the model's context of {limit}", "Use --tokens.")
        about = _about(options, build, model, chosen, len(tokens), switch, worker)
        report = AuditReport(UNKNOWN, "", about, {})
        job = Job(model, settings, switch, tokens, options.tokens, options.widths, echo)
        if options.predict:
            from hiraishin.predict import predict

            report.prediction = predict(
                worker, model, settings, len(tokens), options.tokens, list(options.widths), switch=switch
            )
        trace = replay(worker, job, report)
        if not job.on_gpu:
            watch_operations(worker, job, report)
        measure_floor(worker, job, list(trace["token"]), report)
    if job.on_gpu:
        with Worker(build, {**patient(), **UNFUSED}) as worker:
            replay_unfused(worker, job, report)
            watch_operations(worker, job, report)
    _verdict(report, options)
    if options.explain and report.exit_code == DIFFERS:
        from hiraishin.explain import explain

        report.causes = explain(options, build, model, tokens, switch, report, echo)
    if report.prediction:
        from hiraishin.dispatch import score

        firsts = {e["width"]: e["first_differing_kv"] for e in report.widths}
        report.prediction["score"] = score(report.prediction, report.classes, firsts)
    return report


def _check_gpu(worker: Worker, build: Build, options: AuditOptions, echo: Echo) -> None:
    """Refuse layers on a GPU that the library does not see: it would compute on the CPU and say nothing."""
    if options.gpu_layers and not worker.result("hiraishin.devices:visible")["gpu"]:
        raise UserError(
            f"the {build.name} library sees no GPU, so no layer can be put on one",
            "Check the driver with nvidia-smi, use a CUDA build (./build.sh --backend cuda), or leave --gpu-layers out.",
        )
    if build.backend == "cuda" and not options.gpu_layers:
        echo("this library can use a GPU; without --gpu-layers its CPU part is audited")


def _about(
    options: AuditOptions, build: Build, model: ModelFile, prompt: Prompt, length: int, switch: int, worker: Worker
) -> dict[str, Any]:
    return {
        "build": build.name,
        "backend": build.backend,
        "fingerprint": build.fingerprint,
        "upstream_commit": build.description.get("upstream_commit"),
        "libraries": worker.libraries,
        "machine": _machine(options),
        "switch": switch,
        "model": model.name,
        "quant": model.quant,
        "model_sha256": model.sha256,
        "prompt": prompt.id,
        "prompt_tokens": length,
        "tokens": options.tokens,
        **options.settings(),
    }


def _machine(options: AuditOptions) -> str:
    """The GPU's name if layers run on it, else the processor's."""
    here = provenance.machine()
    return str((here["gpu"] or {}).get("name") or "a GPU") if options.gpu_layers else str(here["cpu"])


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
    shares = [(o["largest_share"], o["share_limit"]) for o in watched if o["largest_share"] is not None]
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
        if any(e["width"] == first["width"] and not e["differing"] for e in report.unfused):
            because = " because of fused kernels (without CUDA fusion its rows are equal)"
        what = {"rounding": "reordered sums", "logic": "a logic error, not rounding", "unknown": "of unknown nature"}[
            report.nature
        ]
        report.verdict = f"not exact, from width {first['width']}{because}; differences look like {what} ({how})"


def _span(widths: tuple[int, ...]) -> str:
    return spell_classes([sorted(widths)])[1:-1]
