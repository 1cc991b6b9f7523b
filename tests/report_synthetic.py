"""Made-up runs for the report's tests: figures' synthetic results, with everything that claims are computed from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import figures_synthetic as synthetic
import pytest

from hiraishin import paths
from hiraishin.bundle import write_bundle
from hiraishin.profile import Model, Profile
from hiraishin.results import Result, ResultSet
from hiraishin.timing import summarize

HOSTILE = "a <script>alert(1)</script> </pre> \x00 \u202eright to left\u202c <b>&amp;"
"""What a prompt or a model may write."""


def profile(**changes: Any) -> Profile:
    """A profile called ``made-up`` for the embedded model in Q4_K_M."""
    return Profile(name="made-up", title="Made up", model=Model(quant="Q4_K_M"), **changes)


def traces(*, moved: bool = False) -> list[Result]:
    """Width-1 rows of both builds; ``moved`` changes one row of the patched build."""
    out = []
    for prompt, (start, tokens) in synthetic.PROMPTS.items():
        for build, switch in (("stock", 0), ("patched", 16)):
            rows = [f"{prompt}-{i}" for i in range(tokens)]
            if moved and build == "patched":
                rows[3] = "moved"
            out.append(
                synthetic.result(
                    "trace",
                    {
                        "build": build,
                        "fingerprint": build,
                        "switch": switch,
                        "prompt": prompt,
                        "prompt_sha256": prompt,
                        "tokens": tokens,
                    },
                    {"prompt_tokens": start, "tokens": list(range(tokens)), "text": "a trace", "rows_sha256": prompt},
                    {"position": list(range(tokens)), "row_sha256": rows},
                )
            )
    return out


def width_one() -> list[Result]:
    """Width 1 replayed on both builds, clean."""
    return [
        synthetic.result(
            "replay",
            {
                "build": build,
                "fingerprint": build,
                "prompt": "tides",
                "prompt_sha256": "tides",
                "switch": switch,
                "width": 1,
            },
            {
                "positions": 128,
                "differing": 0,
                "max_abs_diff": 0.0,
                "flips": 0,
                "flip_margins": [],
                "first_differing": None,
                "first_differing_kv": None,
                "rerun_differing": 0,
                "seconds": 1.0,
            },
        )
        for build, switch in (("stock", 0), ("patched", 16))
    ]


def prices() -> list[Result]:
    """Pass times with the summary that the measuring core adds."""
    made = []
    for r in synthetic.prices():
        assert r.table is not None
        table = {name: r.table[name].tolist() for name in r.table.columns}
        record = {**summarize(table, {}), **r.record}
        made.append(synthetic.result("price", {**dict(r.inputs), "rounds": 7}, record, table))
    return made


def matrix24(*, forks: bool = True, text: str = HOSTILE) -> list[Result]:
    """Four prompts at six draft lengths, each run twice, on both builds; stock forks on two of three."""
    out = []
    for prompt in synthetic.PROMPTS:
        for length in (1, 2, 4, 6, 8, 15):
            for build in ("stock", "patched"):
                for repeat in (0, 1):
                    fork = forks and build == "stock" and length % 4 != 2
                    out.append(
                        synthetic.result(
                            "speculative",
                            {
                                "build": build,
                                "fingerprint": build,
                                "prompt": prompt,
                                "prompt_sha256": prompt,
                                "matrix": "matrix24",
                                "drafter": "lookup",
                                "draft_length": length,
                                "client_guard": False,
                                "prefill": "whole",
                                "repeat": repeat,
                                "tokens": 96,
                            },
                            {
                                "identical": not fork,
                                "first_differing_token": 9 if fork else None,
                                "first_differing_byte": 44 + length if fork else None,
                                "margin_there": 0.04 if fork else None,
                                "accepted": 40,
                                "drafted": 60,
                                "cycles": 50,
                                "tokens": 96,
                                "seconds": {"draft": 0.1, "verify": 1.0, "bookkeeping": 0.01, "prefill": 0.2},
                                "text": f"The cache keeps the entries in a table and a {text}"
                                if fork
                                else "The cache keeps the entries in a table and a list",
                                "plain_text": "The cache keeps the entries in a table and a list",
                            },
                        )
                    )
    return out


def run(parts: Iterable[Result] | None = None, **machine: Any) -> ResultSet:
    """A result set with a profile; by default every part."""
    results = list(parts) if parts is not None else everything()
    return ResultSet(profile(), {"cpu": "A Test Processor", "cores": 2, "gpu": None} | machine, results, name="made-up")


def hunt() -> list[Result]:
    """One pass watched with its causes treated one after the other."""
    attention = {"op": "FLASH_ATTN_EXT", "tensor": "attn-0", "weight_type": "f32", "switch": "split KV"}
    product = {"op": "MUL_MAT", "tensor": "ffn_out-3", "weight_type": "q4_K", "switch": "repack"}
    out = []
    for left_out, origins in (("a+b+c", [attention]), ("b+c", [product, product]), ("c", [])):
        inputs = {"build": f"patched-without-{left_out}", "prompt": "p", "width": 8, "switch": 16}
        record = {"width": 8, "kv_position": 1300, "origins": origins, "differing_rows": len(origins)}
        watched = {"operations": 9, "differing_operations": 1, "watching_changed_rows": 0}
        out.append(synthetic.result("localize", inputs, record | watched))
    return out


def everything(*, exact_stock: bool = False) -> list[Result]:
    """All kinds of results."""
    return [
        *synthetic.replays(exact_stock),
        *width_one(),
        *traces(),
        *prices(),
        *synthetic.bandwidths(),
        *hunt(),
        *matrix24(forks=not exact_stock),
        *(_without_fork(r) if exact_stock else r for r in synthetic.speculative_runs()),
    ]


def one_receipt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt of a made-up GPU in a folder of receipts that the report then reads."""
    results = [
        synthetic.result(
            r.kind,
            dict(r.inputs) | {"gpu_layers": 99, "model": "synthetic-8b"},
            dict(r.record),
            None if r.table is None else dict(r.table),
        )
        for r in [*synthetic.replays(), *prices()]
    ]
    machine = {"cpu": "A CPU", "gpu": {"name": "A Test GPU"}}
    write_bundle(ResultSet(profile(), machine, results, name="cuda"), folder / "made-up-gpu")
    monkeypatch.setattr(paths, "receipts_dir", lambda: folder)


def _without_fork(r: Result) -> Result:
    if r.kind != "speculative":
        return r
    same = {
        "identical": True,
        "first_differing_token": None,
        "first_differing_byte": None,
        "text": r.record["plain_text"],
    }
    return synthetic.result(r.kind, dict(r.inputs), {**r.record, **same}, None if r.table is None else dict(r.table))
