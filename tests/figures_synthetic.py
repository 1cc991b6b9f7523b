"""Made-up result sets with the shape of real ones, for figures that need measurements. Nothing here is evidence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from hiraishin.results import Result, ResultSet, Unit

BASE: dict[str, Any] = {
    "model": "tiny",
    "model_sha256": "0" * 64,
    "quant": "Q4_K_M",
    "threads": 2,
    "flash_attn": True,
    "kv_type": "f16",
    "code": "c0de",
}
WIDTHS = (2, 4, 9, 16)
PROMPTS = {"lru-cache": (60, 128), "binary-search": (48, 96), "tides": (52, 64), "long-rewrite": (240, 300)}


def result(kind: str, inputs: dict[str, Any], record: dict[str, Any], table: dict[str, Any] | None = None) -> Result:
    """One result without a store."""
    unit = Unit(kind, BASE | inputs)
    return Result(unit, record, None if table is None else pd.DataFrame(table), {"library_sha256": "1" * 64}, unit.key)


def result_set(results: list[Result]) -> ResultSet:
    """A result set without a profile."""
    return ResultSet(None, {"cpu": "a test processor", "cores": 2}, results, name="synthetic")


def replays(exact_stock: bool = False) -> list[Result]:
    """Stock differs from width 4 and, in the long prompt, at every width past position 256; patched is exact."""
    rng = np.random.default_rng(5)
    out: list[Result] = []
    for prompt, (start, tokens) in PROMPTS.items():
        margin = rng.gamma(1.2, 2.0, tokens)
        margin[rng.integers(0, tokens, 12)] *= 0.02
        position = np.arange(tokens)
        kv = start + position
        for arm, build, switch in (("stock", "stock", 0), ("patched", "patched", 16)):
            for width in WIDTHS:
                size = 0.0 if arm == "patched" or exact_stock else (0.6 if width >= 8 else 0.4 if width >= 4 else 0.0)
                diff = size * rng.lognormal(0, 0.7, tokens)
                if arm == "stock" and not exact_stock:
                    diff = np.where((kv >= 256) & (diff == 0), 0.15 * rng.lognormal(0, 0.5, tokens), diff)
                    diff[::9] *= 1e-3
                flip = diff > 2.5 * margin
                top = [
                    [int(t), int(t) + 1, int(t) + 2, int(t) + 3, int(t) + 4] if d else None
                    for t, d in zip(position, diff, strict=True)
                ]
                logits = [[9.0, 9.0 - m, 5.0, 4.0, 3.0] if d else None for m, d in zip(margin, diff, strict=True)]
                out.append(
                    result(
                        "replay",
                        {
                            "build": build,
                            "fingerprint": build,
                            "prompt": prompt,
                            "prompt_sha256": prompt,
                            "switch": switch,
                            "width": width,
                        },
                        {
                            "positions": tokens,
                            "differing": int((diff > 0).sum()),
                            "max_abs_diff": float(diff.max()),
                            "flips": int(flip.sum()),
                            "first_differing": int(np.argmax(diff > 0)) if diff.any() else None,
                            "rerun_differing": 0,
                            "seconds": 1.0,
                            "first_differing_kv": int(kv[np.argmax(diff > 0)]) if diff.any() else None,
                        },
                        {
                            "position": position,
                            "kv_position": kv,
                            "token": position + 100,
                            "margin": margin,
                            "differing": diff > 0,
                            "max_abs_diff": diff,
                            "flip": flip,
                            "replayed_token": position + 100 + flip,
                            "top_ids": top,
                            "top_logits": logits,
                            "reference_top_ids": top,
                            "reference_top_logits": logits,
                        },
                    )
                )
    # As a receipt stores it: an exact replay keeps no table, its trace does.
    exact = next(i for i, r in enumerate(out) if r.inputs["build"] == "patched" and r.inputs["width"] == 16)
    r = out[exact]
    assert r.table is not None
    inputs = {k: v for k, v in r.inputs.items() if k != "width"}
    columns = {c: r.table[c].tolist() for c in ("position", "kv_position", "token", "margin")}
    out.append(result("trace", inputs, {"prompt_tokens": 60}, columns))
    out[exact] = Result(r.unit, r.record, None, r.provenance, r.key)
    return out


def prices() -> list[Result]:
    """Pass times of three arms at widths 1 to 16, seven rounds."""
    rng = np.random.default_rng(7)
    table: dict[str, list[Any]] = {"build": [], "width": [], "round": [], "ms": []}
    for arm, slope in (("stock", 0.31), ("patched", 0.36), ("patched-without-cpu-fast", 0.82)):
        for width in range(1, 17):
            for turn in range(7):
                ms = 8.0 * (1 + slope * (width - 1)) * (1 + 0.02 * rng.standard_normal())
                for key, value in (("build", arm), ("width", width), ("round", turn), ("ms", ms)):
                    table[key].append(value)
    return [
        result(
            "price",
            {"builds": ["stock", "patched"], "context": 200, "weight_bytes": 103_668_480},
            {"base": "stock"},
            table,
        )
    ]


def bandwidths() -> list[Result]:
    """One bandwidth measurement."""
    return [result("bandwidth", {}, {"gb_per_s": 21.5})]


CATEGORIES = {"code": 0.85, "math": 0.75, "summary": 0.7, "explain": 0.55, "creative": 0.35, "structured": 0.9}


def speculative_runs() -> list[Result]:
    """An evaluation: four prompts in each of six categories, stock forks on some, patched on none."""
    rng = np.random.default_rng(11)
    out = []
    for category, rate in CATEGORIES.items():
        for n in range(4):
            prompt = f"{category}-{n}"
            where = {"prompt": prompt, "prompt_sha256": prompt, "category": category, "tokens": 96, "prefill": "whole"}
            for build, switch in (("stock", 0), ("patched", 16)):
                out.append(
                    result(
                        "plain",
                        {"build": build, "fingerprint": build, "switch": switch, **where},
                        {
                            "rows_sha256": "r",
                            "tokens": 96,
                            "tokens_per_second": 100 + n,
                            "text": "…",
                            "seconds": {"decode": 0.96},
                        },
                    )
                )
                table: dict[str, list[Any]] = {
                    k: [] for k in ("cycle", "width", "accepted", "draft_ms", "verify_ms", "bookkeeping_ms")
                }
                tokens = 0
                while tokens < 96:
                    drafted = int(rng.integers(1, 9))
                    accepted = int((rng.random(drafted) < rate).cumprod().sum())
                    row = (len(table["cycle"]), drafted + 1, accepted, 1.1 * drafted, 9.0 + 1.9 * drafted, 0.2)
                    for key, value in zip(table, row, strict=True):
                        table[key].append(value)
                    tokens += accepted + 1
                fork = build == "stock" and (n + len(category)) % 2 == 0
                total = {k: sum(table[f"{k}_ms"]) / 1e3 for k in ("draft", "verify", "bookkeeping")} | {"prefill": 0.3}
                out.append(
                    result(
                        "speculative",
                        {
                            "build": build,
                            "fingerprint": build,
                            "switch": switch,
                            **where,
                            "matrix": "evaluation",
                            "drafter": "lookup",
                            "draft_length": 8,
                            "client_guard": False,
                        },
                        {
                            "identical": not fork,
                            "first_differing_token": int(rng.integers(5, 90)) if fork else None,
                            "first_differing_byte": 17 if fork else None,
                            "margin_there": 0.05 if fork else None,
                            "accepted": sum(table["accepted"]),
                            "drafted": sum(table["width"]) - len(table["width"]),
                            "cycles": len(table["cycle"]),
                            "tokens": tokens,
                            "seconds": total,
                            "text": "a",
                            "plain_text": "b" if fork else "a",
                        },
                        table,
                    )
                )
    return out


def examples() -> list[Result]:
    """One run that recorded an example cycle."""
    example = {
        "before": "def get(self, key):\n    ",
        "n_past": 71,
        "last": "if",
        "drafts": [" key", " in", " self", ".", "data", ":"],
        "draft_ids": [1] * 6,
        "emitted": [" key", " in", " self", ".cache"],
        "emitted_ids": [1] * 4,
        "accepted": 3,
        "width": 7,
        "draft_ms": 6.2,
        "verify_ms": 14.9,
        "bookkeeping_ms": 0.1,
    }
    run = speculative_runs()[3]
    return [Result(run.unit, {**run.record, "example": example}, run.table, run.provenance, run.key)]


def localized() -> list[Result]:
    """Stock differs from a MUL_MAT at width 4 and 8; patched at none."""
    out = []
    ops = ("RMS_NORM", "MUL_MAT", "MUL_MAT", "MUL_MAT", "FLASH_ATTN_EXT", "MUL_MAT", "ADD", "MUL_MAT", "GLU", "MUL_MAT")
    for build, switch in (("stock", 0), ("patched", 16)):
        for width in (2, 4, 8, 16):
            table: dict[str, list[Any]] = {
                k: []
                for k in (
                    "index",
                    "layer",
                    "tensor",
                    "op",
                    "weight_type",
                    "shape",
                    "backend",
                    "switch",
                    "differing",
                    "tokens",
                    "verdict",
                    "max_abs_diff",
                )
            }
            start = {2: 10_000, 4: 39, 8: 9, 16: 9}[width] if build == "stock" else 10_000
            for index in range(300):
                op = ops[index % 10]
                origin = index == start or (index > start and index % 10 == 9 and index // 10 % 4 == 3)
                verdict = "equal" if index < start else "origin" if origin else "propagated"
                values = (
                    index,
                    index // 10,
                    f"ffn_out-{index // 10}" if index % 10 == 9 else f"node-{index}",
                    op,
                    "q4_K" if op == "MUL_MAT" else "",
                    "576x4",
                    "CPU_REPACK",
                    "repack: gemm from 4 columns, gemv below" if origin else "",
                    width * (verdict != "equal"),
                    width,
                    verdict,
                    0.0 if verdict == "equal" else 0.01,
                )
                for key, value in zip(table, values, strict=True):
                    table[key].append(value)
            out.append(
                result(
                    "localize",
                    {
                        "build": build,
                        "fingerprint": build,
                        "switch": switch,
                        "prompt": "lru-cache",
                        "prompt_sha256": "p",
                        "width": width,
                    },
                    {"width": width, "position": 0, "origins": []},
                    table,
                )
            )
    return out
