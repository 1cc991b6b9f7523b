"""Trace and replay: record a plain greedy decode, push the same tokens back in batches of one width, compare rows.

Inputs are the same everywhere; only the shape of the batch changes. That makes the replay a test of the verify
pass itself: it is speculative decoding with a perfect drafter, and unlike a comparison of texts it stays useful
after the first difference.

The child half (:func:`measure`) compares raw float bits of whole logit rows with its own build's width-1 rows,
which stay in memory (or a scratch memory map) until the prompt is done. Builds are tied together by the sha256
of those rows.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hiraishin.llama import SWITCH_OFF, Logits, Session, get_model, set_switch

TOP = 5
"""How many candidates are kept of a row that differs."""

IN_MEMORY_BYTES = 512 << 20


def differing_rows(a: Logits, b: Logits) -> npt.NDArray[np.bool_]:
    """Which rows differ in at least one bit.

    Args:
        a, b: float32 ``[rows, n_vocab]``.

    Returns:
        bool ``[rows]``. Bits are compared, so 0.0 differs from -0.0 and a NaN equals itself.

    Raises:
        ValueError: shapes or types differ.
    """
    if a.shape != b.shape or a.dtype != np.float32 or b.dtype != np.float32:
        raise ValueError(f"rows of {a.shape} {a.dtype} and {b.shape} {b.dtype} cannot be compared")
    return np.asarray((a.view(np.uint32) != b.view(np.uint32)).any(axis=1))


def row_sha256(row: Logits) -> str:
    """sha256 over the raw bytes of one logit row."""
    return hashlib.sha256(np.ascontiguousarray(row)).hexdigest()  # type: ignore[arg-type]


def margin(row: Logits) -> float:
    """Top-1 minus top-2 logit of one row."""
    top = np.partition(row, -2)[-2:]
    return float(top[1]) - float(top[0])


def differences(a: Logits, b: Logits) -> tuple[float | None, float | None]:
    """Largest absolute and root mean square difference of two rows; ``None`` where it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.subtract(a, b, dtype=np.float64)
        np.abs(difference, out=difference)
        largest = float(difference.max())
        np.square(difference, out=difference)
        rms = float(np.sqrt(difference.mean()))
    return (largest if np.isfinite(largest) else None), (rms if np.isfinite(rms) else None)


def largest_difference(a: Logits, b: Logits) -> float | None:
    """Largest absolute difference of two rows; ``None`` when it is not finite."""
    return differences(a, b)[0]


def _top(row: Logits) -> tuple[list[int], list[float]]:
    ids = np.argpartition(row, -TOP)[-TOP:]
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return [int(i) for i in ids], [float(v) for v in row[ids]]


class Trace:
    """A recorded plain greedy decode.

    ``tokens[i]`` was chosen at position ``i``; ``rows[i]`` are the logits after feeding ``tokens[i]`` alone, so a
    replayed pass that holds ``tokens[i]`` must reproduce ``rows[i]``. ``n_prompt`` cells precede position 0.
    """

    def __init__(self, n_prompt: int, tokens: list[int], rows: Logits, hashes: list[str], margins: list[float]) -> None:
        self.n_prompt = n_prompt
        self.tokens = tokens
        self.rows = rows
        self.hashes = hashes
        self.margins = margins
        self.argmax = [int(np.argmax(row)) for row in rows]


def _rows_buffer(tokens: int, n_vocab: int, scratch: Path | None) -> Logits:
    if scratch is None or tokens * n_vocab * 4 <= IN_MEMORY_BYTES:
        return np.empty((tokens, n_vocab), np.float32)
    scratch.mkdir(parents=True, exist_ok=True)
    # Unlinked at once: the map lives as long as this process, whatever happens to it.
    with tempfile.TemporaryFile(dir=scratch) as handle:
        return np.memmap(handle, np.float32, "w+", shape=(tokens, n_vocab))


def record_trace(
    session: Session,
    prompt: Sequence[int],
    tokens: int,
    *,
    switch: int = SWITCH_OFF,
    parts_off: int = 0,
    scratch: Path | None = None,
) -> Trace:
    """Prefill a prompt with the switch off, then decode greedily one token at a time, past end-of-text.

    Prefilling with the switch off keeps the plain output the same whether or not a prompt, or the last piece of
    one, happens to be 2 to 16 tokens long.

    Args:
        session: an empty cache.
        prompt: the prompt's tokens.
        tokens: how many to decode.
        switch: the switch's value while decoding; it stays in force afterwards.
        parts_off: causes to leave untreated.
        scratch: where rows go that are too many for memory.

    Returns:
        the trace, ``tokens`` positions long; the cache holds prompt and trace afterwards.
    """
    set_switch(SWITCH_OFF)
    row = session.prefill(prompt)
    set_switch(switch, parts_off)
    rows = _rows_buffer(tokens, session.model.n_vocab, scratch)
    chosen: list[int] = []
    hashes: list[str] = []
    margins: list[float] = []
    for index in range(tokens):
        chosen.append(int(np.argmax(row)))
        rows[index] = session.decode(chosen[-1:])[0]
        row = rows[index]
        hashes.append(row_sha256(row))
        margins.append(margin(row))
    return Trace(len(prompt), chosen, rows, hashes, margins)


def replay_once(session: Session, trace: Trace, width: int) -> tuple[dict[str, list[Any]], float, float]:
    """Push a trace back in passes of ``width`` tokens and compare every row with the trace's.

    Returns:
        columns (one entry a position), seconds in all, seconds inside the decode calls.
    """
    session.rollback(trace.n_prompt)
    count = len(trace.tokens)
    columns: dict[str, list[Any]] = {
        "position": list(range(count)),
        "kv_position": [trace.n_prompt + i for i in range(count)],
        "token": list(trace.tokens),
        "margin": list(trace.margins),
        "differing": [False] * count,
        "max_abs_diff": [0.0] * count,
        "rms_diff": [0.0] * count,
        "flip": [False] * count,
        "replayed_token": list(trace.argmax),
        "row_sha256": list(trace.hashes),
    }
    for name in ("reference_top_ids", "reference_top_logits", "top_ids", "top_logits"):
        columns[name] = [None] * count
    started = time.perf_counter()
    inside = 0.0
    for start in range(0, count, width):
        piece = trace.tokens[start : start + width]
        before = time.perf_counter()
        logits = session.decode(piece)
        inside += time.perf_counter() - before
        reference = trace.rows[start : start + len(piece)]
        for offset in np.flatnonzero(differing_rows(logits, reference)):
            index, row, was = start + int(offset), logits[offset], reference[offset]
            columns["differing"][index] = True
            columns["max_abs_diff"][index], columns["rms_diff"][index] = differences(row, was)
            columns["replayed_token"][index] = int(np.argmax(row))
            columns["flip"][index] = columns["replayed_token"][index] != trace.argmax[index]
            columns["row_sha256"][index] = row_sha256(row)
            columns["top_ids"][index], columns["top_logits"][index] = _top(row)
            columns["reference_top_ids"][index], columns["reference_top_logits"][index] = _top(was)
    return columns, time.perf_counter() - started, inside


def summarize(columns: dict[str, list[Any]], again: dict[str, list[Any]] | None) -> dict[str, Any]:
    """A replay's record: counts, first difference, largest difference, flips, and run-to-run noise."""
    different = [i for i, d in enumerate(columns["differing"]) if d]
    finite = [columns["max_abs_diff"][i] for i in different if columns["max_abs_diff"][i] is not None]
    flips = [i for i, f in enumerate(columns["flip"]) if f]
    return {
        "positions": len(columns["position"]),
        "differing": len(different),
        "first_differing": different[0] if different else None,
        "first_differing_kv": columns["kv_position"][different[0]] if different else None,
        "max_abs_diff": None if len(finite) < len(different) else max(finite, default=0.0),
        "flips": len(flips),
        "flip_margins": [columns["margin"][i] for i in flips],
        "rerun_differing": None
        if again is None
        else sum(a != b for a, b in zip(columns["row_sha256"], again["row_sha256"], strict=True)),
    }


def measure(
    *,
    model_path: str,
    settings: dict[str, Any],
    switch: int,
    parts_off: int,
    prompt: list[int],
    tokens: int,
    widths: list[int],
    scratch: str | None = None,
    rerun: bool = True,
) -> Iterator[dict[str, Any]]:
    """Child: one prompt, all widths. Yields ``{"kind": "trace" | "replay", "width", "record", "table"}``.

    The prompt is prefilled with the switch off and decoded with it on, so that the plain output does not depend
    on whether a prompt, or its last piece, happens to be 2 to 16 tokens long.
    """
    model = get_model(
        model_path, gpu_layers=settings.get("gpu_layers", 0), extra_bufts=settings.get("extra_bufts", True)
    )
    with Session(
        model,
        n_ctx=len(prompt) + tokens,
        n_batch=settings.get("n_batch", 512),
        threads=settings["threads"],
        flash_attn=settings["flash_attn"],
        kv_type=settings["kv_type"],
    ) as session:
        trace = record_trace(
            session, prompt, tokens, switch=switch, parts_off=parts_off, scratch=Path(scratch) if scratch else None
        )
        yield {
            "kind": "trace",
            "width": 1,
            "record": {
                "prompt_tokens": trace.n_prompt,
                "tokens": trace.tokens,
                "text": model.detokenize(trace.tokens).decode("utf-8", errors="replace"),
                "rows_sha256": hashlib.sha256("".join(trace.hashes).encode()).hexdigest(),
                "switch_in_force": switch,
            },
            "table": {
                "position": list(range(tokens)),
                "kv_position": [trace.n_prompt + i for i in range(tokens)],
                "token": trace.tokens,
                "argmax": trace.argmax,
                "margin": trace.margins,
                "row_sha256": trace.hashes,
            },
        }
        for width in widths:
            columns, seconds, inside = replay_once(session, trace, width)
            again = replay_once(session, trace, width)[0] if rerun else None
            record = summarize(columns, again)
            record |= {"seconds": seconds, "decode_seconds": inside, "switch_in_force": switch}
            yield {"kind": "replay", "width": width, "record": record, "table": columns}
        set_switch(SWITCH_OFF)


def reorder_floor(
    *, model_path: str, settings: dict[str, Any], changes: dict[str, Any], prompt: list[int], tokens: list[int]
) -> Iterator[dict[str, Any]]:
    """Child: width-1 rows of one token sequence under two settings that differ in the order of sums alone.

    Both decode the same tokens one at a time, so no batch is involved: whatever moves is the size of rounding in
    this model. Returns ``max`` and ``rms`` of the differing rows, and how many differ.
    """
    rows: list[Logits] = []
    largest: list[float] = []
    spread: list[float] = []
    set_switch(SWITCH_OFF)
    for variant in (settings, {**settings, **changes}):
        model = get_model(
            model_path, gpu_layers=variant.get("gpu_layers", 0), extra_bufts=variant.get("extra_bufts", True)
        )
        with Session(
            model,
            n_ctx=len(prompt) + len(tokens),
            n_batch=variant.get("n_batch", 512),
            threads=variant["threads"],
            flash_attn=variant["flash_attn"],
            kv_type=variant["kv_type"],
        ) as session:
            session.prefill(prompt)
            for index, token in enumerate(tokens):
                row = session.decode([token])[0]
                if variant is settings:
                    rows.append(row.copy())
                elif differing_rows(row[None], rows[index][None]).any():
                    most, rms = differences(row, rows[index])
                    largest.append(most or 0.0)
                    spread.append(rms or 0.0)
    yield {
        "return": {
            "differing": len(largest),
            "positions": len(tokens),
            "max": max(largest, default=0.0),
            "rms_max": max(spread, default=0.0),
            "rms_median": float(np.median(spread)) if spread else 0.0,
        }
    }
