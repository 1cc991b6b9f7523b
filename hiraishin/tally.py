"""Tables over speculative runs: exactness, acceptance and speed side by side, and every fork with its numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from hiraishin.intervals import binomial_interval, median_interval
from hiraishin.results import Result, ResultSet

EVERY = "all"
"""The row over all categories."""


def _row(members: Sequence[Result]) -> dict[str, Any]:
    records = [r.record for r in members]
    prompts = {r.inputs["prompt"] for r in members}
    wrong = {r.inputs["prompt"] for r in members if not r.record["identical"]}
    same = sum(bool(r["identical"]) for r in records)
    low, high = binomial_interval(same, len(records))
    cycles = sum(r["cycles"] for r in records)
    drafted, accepted = sum(r["drafted"] for r in records), sum(r["accepted"] for r in records)
    decoded = sum(r["tokens"] - 1 for r in records)
    seconds = sum(r["seconds"]["decode"] for r in records)
    pairs = [
        r["tokens_per_second"] / r["plain_tokens_per_second"]
        for r in records
        if r["tokens_per_second"] and r["plain_tokens_per_second"]
    ]
    plain = sum((r["tokens"] - 1) / r["plain_tokens_per_second"] for r in records if r["plain_tokens_per_second"])
    interval = median_interval(pairs)
    return {
        "prompts": len(prompts),
        "runs": len(records),
        "identical": same,
        "share_low": low,
        "share_high": high,
        "prompts_forked": len(wrong),
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_cycle": decoded / cycles if cycles else None,
        "mean_width": sum(r["cycles"] + r["drafted"] for r in records) / cycles if cycles else None,
        "plain_tokens_per_second": decoded / plain if plain else None,
        "tokens_per_second": decoded / seconds if seconds else None,
        "speedup": plain / seconds if seconds else None,
        "paired_speedup": statistics.median(pairs) if pairs else None,
        "paired_low": interval[0] if interval else None,
        "paired_high": interval[1] if interval else None,
        "bookkeeping_share": sum(r["seconds"]["bookkeeping"] for r in records) / seconds if seconds else None,
    }


def outcome_table(results: ResultSet, by: Sequence[str] = ("category",), **inputs: Any) -> pd.DataFrame:
    """Text, acceptance and speed: a row for every matrix, drafter, group and build, and one over all groups.

    Args:
        results: with units of kind ``speculative``.
        by: inputs that make the groups, for example ``("category",)`` or ``("draft_length",)``.
        inputs: only runs with these inputs, for example ``matrix="evaluation"``, ``prefill="whole"``.

    Returns:
        indexed by matrix, prefill, drafter, ``by`` and build. ``share_low`` and ``share_high`` bound the share of
        identical runs (exact binomial, 95 %); ``paired_speedup`` is the median over runs of the speed against the
        plain decode of the same prompt in the same process, with an exact interval; ``speedup`` weighs by tokens.
        Empty when nothing was measured.
    """
    keys = [*dict.fromkeys(["matrix", "prefill", "drafter", *by, "build"])]
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for run in results.of("speculative", **inputs):
        own = {k: run.inputs.get(k) for k in keys}
        for labels in (own, {**own, **dict.fromkeys(by, EVERY)}):
            groups.setdefault(tuple(labels[k] for k in keys), []).append(run)
    # Within a group stock comes first; the row over all groups comes last.
    order = sorted(groups, key=lambda g: [(x == EVERY, x != "stock", str(x).zfill(4)) for x in g])
    frame = pd.DataFrame([dict(zip(keys, g, strict=True)) | _row(groups[g]) for g in order])
    return frame.set_index(keys) if len(frame) else frame


def forks_table(results: ResultSet, **inputs: Any) -> pd.DataFrame:
    """Every run that left the plain text: where, at which margin, by how much the row had moved, and both texts.

    Returns:
        one row a fork; ``plain`` and ``speculative`` are the first 60 characters from the fork on. Reruns
        (``repeat`` above 0) have rows of their own.
    """
    rows = []
    for r in results.of("speculative", **inputs):
        if r.record["identical"]:
            continue
        plain, other = str(r.record["plain_text"]), str(r.record["text"])
        at = next(
            (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other))
        )
        keys = ("matrix", "build", "prompt", "drafter", "draft_length", "prefill", "client_guard", "repeat")
        numbers = (
            "first_differing_token",
            "first_differing_byte",
            "fork_kind",
            "fork_width",
            "margin_there",
            "row_diff",
        )
        rows.append(
            {k: r.inputs.get(k) for k in keys}
            | {k: r.record.get(k) for k in numbers}
            | {"plain": plain[at : at + 60], "speculative": other[at : at + 60]}
        )
    if not rows:
        return pd.DataFrame()
    order = ["matrix", "build", "prompt", "drafter", "draft_length", "repeat"]
    return pd.DataFrame(rows).sort_values(order, ignore_index=True)


def guard_table(results: ResultSet, **inputs: Any) -> pd.DataFrame:
    """What never crossing a multiple of 256 costs the client: the same runs with and without the guard.

    Returns:
        one row a matrix, drafter and build: pairs of runs, passes that the guard shortened, and cycles, tokens and tokens a
        cycle without and with it. Empty when no run has its pair.
    """
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    sides: dict[tuple[Any, ...], dict[bool, Result]] = {}
    keys = (
        "matrix",
        "drafter",
        "build",
        "prompt",
        "prompt_sha256",
        "draft_length",
        "prefill",
        "repeat",
        "quant",
        "threads",
        "kv_type",
    )
    for r in results.of("speculative", **inputs):
        sides.setdefault(tuple(r.inputs.get(k) for k in keys), {})[bool(r.inputs["client_guard"])] = r
    for key, pair in sides.items():
        if len(pair) == 2:
            row = rows.setdefault((str(key[0]), str(key[1]), str(key[2])), Counter())
            row["runs"] += 1
            row["shortened"] += pair[True].record["guarded_cycles"]
            for side, name in ((False, "without"), (True, "with")):
                row[f"cycles_{name}"] += pair[side].record["cycles"]
                row[f"tokens_{name}"] += pair[side].record["tokens"] - 1
    frame = pd.DataFrame([dict(zip(keys, at, strict=False)) | row for at, row in sorted(rows.items())])
    if frame.empty:
        return frame
    for name in ("without", "with"):
        frame[f"tokens_per_cycle_{name}"] = frame[f"tokens_{name}"] / frame[f"cycles_{name}"]
    return frame.set_index(list(keys[:3]))
