"""Which operation differs first: the same tokens alone and in one pass, operation by operation, bit for bit.

For each operation and token the verdict is *origin* (its inputs for that token were equal, its output was not) or
*propagated* (an input differed already). Two independent causes in one pass show as two origins. Attention reads
the KV cache, so its inputs include the rows that the tokens before it in the same pass wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hiraishin.dispatch import kernel_switch
from hiraishin.errors import UserError
from hiraishin.llama import SWITCH_OFF, Session, get_model, set_switch
from hiraishin.replay import Trace, differing_rows, record_trace
from hiraishin.watch import Node, Watch

_LAYER = re.compile(r"-(\d+)(?:\s|$|\()")


@dataclass
class Compared:
    """One operation of the graph, compared for every token of the pass."""

    index: int
    node: Node
    differing: list[bool]
    origin: list[bool]
    max_abs_diff: float | None
    first_element: int | None
    known: bool
    relative: float | None = None
    """Where it is an origin: rms of the difference over rms of the lone token's values, the worst token's; ``inf`` when
    not finite."""


def _token_axis(lone: Node, batch: Node, tokens: int) -> int | None:
    """The array axis (of ``bits``) that counts tokens: 1 alone, ``tokens`` in the pass, all others equal."""
    axes = [
        3 - i
        for i, (a, b) in enumerate(zip(lone.shape, batch.shape, strict=True))
        if a == 1 and b == tokens and tokens > 1
    ]
    return axes[-1] if axes else None


def _floats(bits: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float64] | None:
    if kind == "f32":
        return bits.view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return None


def compare_passes(lone: list[list[Node]], batch: list[list[Node]], widths: list[int]) -> list[Compared]:
    """Compare the graphs of lone passes with the graph(s) of one batched pass over the same tokens.

    Args:
        lone: one graph a token, in order.
        batch: the graphs that the batched pass ran as (more than one where the library split it).
        widths: how many tokens each graph of the batched pass held; they sum to ``len(lone)``.

    Returns:
        the operations in graph order.

    Raises:
        UserError: the graphs do not hold the same operations, so they cannot be compared one by one.
    """
    total = len(lone)
    if sum(widths) != total or len(batch) != len(widths):
        raise UserError(
            f"the pass ran as {len(batch)} graphs over {sum(widths)} of {total} tokens; it cannot be compared"
        )
    names = [(n.op, n.name) for n in lone[0]]
    for graph in [*lone, *batch]:
        if [(n.op, n.name) for n in graph] != names:
            raise UserError(
                "alone and in a batch, llama.cpp builds graphs of different operations; they cannot be compared"
            )
    out: list[Compared] = []
    # Per graph of the pass: tensor address -> which of all tokens differ there so far.
    state: list[dict[int, npt.NDArray[np.bool_]]] = [{} for _ in batch]
    starts = np.concatenate([[0], np.cumsum(widths)])
    for index in range(len(names)):
        differing, origin = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
        largest: float | None = 0.0
        first: int | None = None
        relative: float | None = None
        known = True
        for part, width in enumerate(widths):
            node = batch[part][index]
            known = known and _compare_part(
                node,
                [lone[t][index] for t in range(starts[part], starts[part + 1])],
                differing[starts[part] : starts[part + 1]],
            )
            inputs = np.zeros(width, np.bool_)
            for source in node.sources:
                seen = state[part].get(source)
                if seen is not None:
                    inputs |= seen
            here = differing[starts[part] : starts[part + 1]]
            writes_cache = node.op in ("SET_ROWS", "CPY") and node.bits is None
            if writes_cache:
                # A copy into the KV cache: it starts nothing, and later tokens of the pass read it too.
                here |= np.logical_or.accumulate(inputs)
            elif not known:
                here |= inputs
            origin[starts[part] : starts[part + 1]] = here & ~inputs & (not writes_cache)
            previous = (
                state[part].get(node.root, np.zeros(width, np.bool_))
                if node.bits is None
                else np.zeros(width, np.bool_)
            )
            state[part][node.root] = here | previous
            if here.any() and node.bits is not None:
                singles = [lone[t][index] for t in range(starts[part], starts[part + 1])]
                diff, element, share = _sizes(node, singles, origin[starts[part] : starts[part + 1]])
                largest = None if diff is None or largest is None else max(largest, diff)
                first = element if first is None else first
                if share is not None:
                    relative = share if relative is None else max(relative, share)
        out.append(
            Compared(index, batch[0][index], differing.tolist(), origin.tolist(), largest, first, known, relative)
        )
    return out


def _slices(node: Node, lone: list[Node]) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]] | None]:
    axis = _token_axis(lone[0], node, len(lone))
    for offset, single in enumerate(lone):
        if node.bits is None or single.bits is None:
            yield None
            continue
        mine = node.bits if axis is None else np.take(node.bits, [offset], axis=axis)
        if mine.shape != single.bits.shape:
            # The attended range grew inside the pass: compare the part that both have.
            cut = tuple(slice(0, min(a, b)) for a, b in zip(mine.shape, single.bits.shape, strict=True))
            yield mine[cut], single.bits[cut]
        else:
            yield mine, single.bits


def _compare_part(node: Node, lone: list[Node], differing: npt.NDArray[np.bool_]) -> bool:
    known = True
    for offset, pair in enumerate(_slices(node, lone)):
        if pair is None:
            known = False
        else:
            differing[offset] = not np.array_equal(pair[0], pair[1])
    return known


def _sizes(
    node: Node, lone: list[Node], origin: npt.NDArray[np.bool_]
) -> tuple[float | None, int | None, float | None]:
    """Largest difference (``None``: not finite), first element that differs, relative size at the worst origin."""
    largest: float | None = 0.0
    element: int | None = None
    relative: float | None = None
    for offset, pair in enumerate(_slices(node, lone)):
        if pair is None or np.array_equal(pair[0], pair[1]):
            continue
        where = np.flatnonzero(pair[0].ravel() != pair[1].ravel())
        element = int(where[0]) if element is None else element
        a, b = _floats(np.ascontiguousarray(pair[0]), node.type), _floats(np.ascontiguousarray(pair[1]), node.type)
        if a is None or b is None:
            largest = None
            continue
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            value = float(np.max(np.abs(a - b)))
            share = float(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))
        largest = None if largest is None or not np.isfinite(value) else max(largest, value)
        if origin[offset]:
            share = share if np.isfinite(share) else float("inf")
            relative = share if relative is None else max(relative, share)
    return largest, element, relative


def table_of(compared: list[Compared], width: int, settings: dict[str, Any]) -> dict[str, list[Any]]:
    """The compared operations as columns, in graph order."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "index",
            "layer",
            "tensor",
            "op",
            "weight",
            "weight_type",
            "shape",
            "backend",
            "switch",
            "differing",
            "tokens",
            "verdict",
            "max_abs_diff",
            "first_element",
            "relative",
        )
    }
    for item in compared:
        node = item.node
        layer = _LAYER.search(node.name)
        verdict = "origin" if any(item.origin) else "propagated" if any(item.differing) else "equal"
        values = (
            item.index,
            int(layer.group(1)) if layer else None,
            node.name,
            node.op,
            node.weight,
            node.weight_type,
            "x".join(str(n) for n in node.shape),
            node.buffer,
            kernel_switch(node.op, node.weight_type, node.buffer, node.shape, width, settings),
            sum(item.differing),
            len(item.differing),
            verdict,
            item.max_abs_diff,
            item.first_element,
            # JSON has no infinity; a share past any limit says the same.
            None if item.relative is None else min(item.relative, 1e30),
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return columns


def measure(
    *,
    model_path: str,
    settings: dict[str, Any],
    switch: int,
    parts_off: int,
    prompt: list[int],
    tokens: int,
    width: int,
    start: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Child: watch one pass of ``width`` tokens and yield one localize event.

    It is the pass that begins at position ``start``, or without one the first pass with a differing row.

    Raises:
        UserError: the trace has no full pass at ``start``.
    """
    model = get_model(
        model_path, gpu_layers=settings.get("gpu_layers", 0), extra_bufts=settings.get("extra_bufts", True)
    )
    watch = Watch()
    with Session(
        model,
        n_ctx=len(prompt) + tokens + width,
        n_batch=settings.get("n_batch", 512),
        threads=settings["threads"],
        flash_attn=settings["flash_attn"],
        kv_type=settings["kv_type"],
        cb_eval=watch.callback,
    ) as session:
        trace = record_trace(session, prompt, tokens, switch=switch, parts_off=parts_off)
        if start is None:
            start = _first_differing_pass(session, trace, width)
        if not 0 <= start <= len(trace.tokens) - width:
            raise UserError(f"a trace of {len(trace.tokens)} tokens has no pass of {width} tokens at position {start}")
        # The cache of the plain decode: earlier passes of this width would have left other rows in it.
        session.rollback(trace.n_prompt)
        for token in trace.tokens[:start]:
            session.decode([token])
        unwatched = session.decode(trace.tokens[start : start + width]).copy()
        piece = trace.tokens[start : start + width]
        position = trace.n_prompt + start
        session.rollback(position)
        watch.start()
        lone_rows = [session.decode([token])[0].copy() for token in piece]
        lone = watch.stop()
        session.rollback(position)
        watch.start()
        rows = session.decode(piece).copy()
        batch = watch.stop()
        widths = _widths(batch, lone)
        compared = compare_passes(lone, batch, widths)
        set_switch(SWITCH_OFF)
    columns = table_of(compared, width, settings)
    origins = [
        {
            key: columns[key][i]
            for key in (
                "index",
                "layer",
                "tensor",
                "op",
                "weight",
                "weight_type",
                "backend",
                "switch",
                "max_abs_diff",
                "relative",
            )
        }
        for i, verdict in enumerate(columns["verdict"])
        if verdict == "origin"
    ]
    reference = trace.rows[start : start + len(piece)]
    record = {
        "width": width,
        "position": start,
        "kv_position": position,
        "operations": len(compared),
        "differing_operations": sum(v != "equal" for v in columns["verdict"]),
        "differing_rows": int(differing_rows(rows, np.stack(lone_rows)).sum()),
        "origins": origins,
        "graphs": widths,
        "watching_changed_rows": int(differing_rows(rows, unwatched).sum())
        + int(differing_rows(np.stack(lone_rows), reference).sum()),
        "switch_in_force": switch,
    }
    yield {"kind": "localize", "width": width, "record": record, "table": columns}


def _first_differing_pass(session: Session, trace: Trace, width: int) -> int:
    """Start of the first full pass with a differing row, or of the first pass if none differs."""
    session.rollback(trace.n_prompt)
    for start in range(0, len(trace.tokens) - width + 1, width):
        logits = session.decode(trace.tokens[start : start + width])
        if differing_rows(logits, trace.rows[start : start + width]).any():
            return start
    return 0


def _widths(batch: list[list[Node]], lone: list[list[Node]]) -> list[int]:
    """Tokens in each graph of the batched pass: the size that is 1 alone, read off the first operation that has one."""
    widths = []
    for graph in batch:
        sizes = [
            b
            for one, many in zip(lone[0], graph, strict=False)
            for a, b in zip(one.shape[1:], many.shape[1:], strict=True)
            if a == 1 and b > 1
        ]
        widths.append(max(set(sizes), key=sizes.count) if sizes else 1)
    return widths
