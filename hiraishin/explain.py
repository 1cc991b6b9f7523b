"""Causal controls: flip a switch that removes one cause, replay, and see whether the difference goes away."""

from __future__ import annotations

from typing import Any

from hiraishin.audit_steps import patient
from hiraishin.builds import Build
from hiraishin.errors import UserError
from hiraishin.models import ModelFile
from hiraishin.worker import Worker

_CONTROLS: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
    ("weights not repacked", {"extra_bufts": False}, {}),
    ("tiled path off", {}, {"GGML_CPU_TILED_MM": "0"}),
    ("no repack, tiled path off", {"extra_bufts": False}, {"GGML_CPU_TILED_MM": "0"}),
    ("one thread", {"threads": 1}, {}),
    ("quantized KV cache", {"kv_type": "q8_0"}, {}),
    ("flash attention off", {"flash_attn": False, "kv_type": "f16"}, {}),
    ("flash attention on", {"flash_attn": True}, {}),
)
_CUDA: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
    ("CUDA graphs off", {}, {"GGML_CUDA_DISABLE_GRAPHS": "1"}),
    ("CUDA fusion off", {}, {"GGML_CUDA_DISABLE_FUSION": "1"}),
    ("flash attention off", {"flash_attn": False, "kv_type": "f16"}, {}),
    ("flash attention on", {"flash_attn": True}, {}),
)


def explain(
    options: Any, build: Build, model: ModelFile, prompt: list[int], switch: int, report: Any, echo: Any
) -> list[dict[str, Any]]:
    """Replay one width of each differing class under every control.

    Returns:
        one entry a control: its name, rows that differ per width before and after, and a finding in words. A cause
        is proved where a control that removes it alone leaves no differing row.
    """
    wrong = {e["width"]: e["differing"] for e in report.widths if e["differing"]}
    widths = sorted({next(w for w in c if w in wrong) for c in report.classes if any(w in wrong for w in c)})
    found: list[dict[str, Any]] = []
    controls = [(*c, switch) for c in (_CUDA if build.backend == "cuda" else _CONTROLS)]
    if build.description.get("patches"):
        controls.append(("serial mode", {}, {}, -1))
    for name, change, env, value in controls:
        if all(options.settings().get(k) == v for k, v in change.items()) and not env and value == switch:
            continue
        try:
            after = _differing(
                build, model, {**options.settings(), **change}, env, value, prompt, options.tokens, widths
            )
        except UserError as error:
            found.append({"control": name, "after": None, "finding": f"not possible here: {error.what}"})
            continue
        gone = [w for w in widths if after[w] == 0]
        finding = (
            f"the difference goes away at width {', '.join(map(str, gone))}"
            if gone
            else "the difference stays at every width tried"
        )
        echo(f"{name}: {finding}")
        found.append({"control": name, "before": {w: wrong[w] for w in widths}, "after": after, "finding": finding})
    return found


def _differing(
    build: Build,
    model: ModelFile,
    settings: dict[str, Any],
    env: dict[str, str],
    switch: int,
    prompt: list[int],
    tokens: int,
    widths: list[int],
) -> dict[int, int]:
    after: dict[int, int] = {}
    with Worker(build, {**patient(), **env}) as worker:
        for event in worker.call(
            "hiraishin.replay:measure",
            model_path=str(model.path),
            settings=settings,
            switch=switch,
            parts_off=0,
            prompt=prompt,
            tokens=tokens,
            widths=widths,
            rerun=False,
        ):
            if event.get("kind") == "replay":
                after[event["width"]] = event["record"]["differing"]
    return after
