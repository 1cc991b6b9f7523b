"""Pass time by width, and the memory bandwidth that bounds it.

Widths and builds are interleaved: a round times every width once on one build, then the same on the next, so a
machine that slows down slows all of them. Ratios come from medians over the rounds of one run. A verify pass
needs the logits of every row, so all rows are asked for (llama-bench asks for one).
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hiraishin.llama import Session, get_model, set_switch

_open: tuple[Session, list[int]] | None = None


def prepare(*, model_path: str, settings: dict[str, Any], context: int, max_width: int) -> Iterator[dict[str, Any]]:
    """Child: open a session whose cache holds ``context`` tokens, for the rounds that follow."""
    global _open
    if _open is not None:
        _open[0].close()
    model = get_model(model_path, gpu_layers=settings.get("gpu_layers", 0))
    session = Session(
        model,
        n_ctx=context + max_width,
        n_batch=settings.get("n_batch", 512),
        threads=settings["threads"],
        flash_attn=settings["flash_attn"],
        kv_type=settings["kv_type"],
    )
    # Any tokens do: the time of a pass does not depend on them. A fixed walk over the vocabulary, never token 0.
    tokens = [1 + (i * 7919) % (model.n_vocab - 1) for i in range(context + max_width)]
    set_switch(0)
    session.prefill(tokens[:context])
    _open = (session, tokens[context:])
    yield {"return": {"n_vocab": model.n_vocab}}


def time_round(
    *, widths: list[int], switch: int, parts_off: int, hashes: bool, settle: int = 0
) -> Iterator[dict[str, Any]]:
    """Child: time one pass of each width, rolled back in between. Milliseconds, in the order of ``widths``.

    ``settle`` passes of the same width come before the timed one: a GPU records a new CUDA graph when the width
    changes, and a steady decode or a build that keeps a graph a width does not pay for that.
    """
    assert _open is not None, "prepare comes first"
    session, tokens = _open
    context = session.n_past
    set_switch(switch, parts_off)
    # Not timed: this process' threads wake up while those of the process that had its turn before fall asleep. Without
    # it the first pass after a change of process takes several milliseconds more, half as much again at one token.
    session.decode(tokens[:1])
    session.rollback(context)
    milliseconds = []
    rows: dict[str, list[str]] = {}
    for width in widths:
        for _ in range(settle):
            session.decode(tokens[:width])
            session.rollback(context)
        started = time.perf_counter()
        logits = session.decode(tokens[:width])
        milliseconds.append(1e3 * (time.perf_counter() - started))
        if hashes:
            rows[str(width)] = [hashlib.sha256(row).hexdigest()[:16] for row in logits]
        session.rollback(context)
    set_switch(0)
    yield {"return": {"ms": milliseconds, "rows": rows}}


def finish() -> Iterator[dict[str, Any]]:
    """Child: free the session of :func:`prepare`."""
    global _open
    if _open is not None:
        _open[0].close()
        _open = None
    yield {"return": None}


def summarize(
    table: Mapping[str, Sequence[Any]], rows: Mapping[str, Mapping[str, list[str]]], base: str = "stock"
) -> dict[str, Any]:
    """Medians, ratios over the base build's one-token pass, spread, and whether the first row is the lone token's.

    Args:
        table: columns build, width, round, ms.
        rows: build -> width -> row hashes of one round.

    Returns:
        ``median_ms``, ``ratio`` and ``spread`` (interquartile range over median) as build -> width -> value, and
        ``first_row_differs`` as build -> width -> 1 if the first row differs from the base build's lone token (the
        one position that width 1 shares with the wider passes), else 0.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for build, width, ms in zip(table["build"], table["width"], table["ms"], strict=True):
        times.setdefault((str(build), int(width)), []).append(float(ms))
    medians = {key: statistics.median(values) for key, values in times.items()}
    base_build = base if (base, 1) in medians else str(table["build"][0])
    one = medians[(base_build, 1)]
    out: dict[str, dict[str, dict[str, float]]] = {"median_ms": {}, "ratio": {}, "spread": {}}
    for (build, width), median in sorted(medians.items()):
        values = np.asarray(times[(build, width)])
        quarter = float(np.subtract(*np.percentile(values, [75, 25])))
        out["median_ms"].setdefault(build, {})[str(width)] = median
        out["ratio"].setdefault(build, {})[str(width)] = median / one
        out["spread"].setdefault(build, {})[str(width)] = quarter / median
    alone = rows.get(base_build, {}).get("1", [])
    first = {
        build: {width: int(bool(alone) and hashes[0] != alone[0]) for width, hashes in by_width.items()}
        for build, by_width in rows.items()
    }
    return {**out, "first_row_differs": first, "base": base_build}


def bandwidth(*, threads: int, megabytes: int = 256, rounds: int = 7) -> Iterator[dict[str, Any]]:
    """Child: how fast this machine reads memory, in GB/s, best of several rounds.

    Each thread reduces its own slice of an array far larger than the caches. Reading is what a pass over the
    weights does, so nothing is written.
    """
    data = np.ones(megabytes * (1 << 20) // 8, np.int64)
    slices = np.array_split(data, threads)
    best = 0.0
    for _ in range(rounds):
        workers = [threading.Thread(target=np.bitwise_or.reduce, args=(piece,)) for piece in slices]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, data.nbytes / (time.perf_counter() - started) / 1e9)
    yield {"return": {"gb_per_s": best}}
