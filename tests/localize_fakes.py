"""Graphs that nobody ran: a few operations over invented rows, alone and in a pass, with differences where a test wants them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hiraishin.watch import Node

VALUES = 4
Ops = list[tuple[str, str, tuple[int, ...]]]
"""(name, operation, sources by index in the list; -1 stands for the graph's input, -2 for the KV cache)."""

INPUT, CACHE = 1, 2

CHAIN: Ops = [
    ("norm-0", "RMS_NORM", (-1,)),
    ("Kcur-0", "MUL_MAT", (0,)),
    ("cache_k_l0", "SET_ROWS", (1,)),
    ("Qcur-0", "MUL_MAT", (0,)),
    ("kqv-0", "FLASH_ATTN_EXT", (3, -2)),
    ("ffn_out-0", "MUL_MAT", (4,)),
    ("result", "ADD", (5, 0)),
]
"""A layer: the input is normed; a row of K goes into the cache; Q attends to it; a multiplication; a sum."""


def graph(ops: Ops, tokens: list[int], moved: Mapping[tuple[str, int], int], cells: int = 0) -> list[Node]:
    """One graph over ``tokens`` (numbers that tell tokens apart). ``moved`` maps (operation, token) to ulps added.

    Rows are a function of the operation and the token alone, so that a moved row must be asked for. Operations called
    ``mask...`` have ``cells`` values a token.
    """
    made: list[Node] = []
    for index, (name, op, sources) in enumerate(ops):
        values = cells if name.startswith("mask") else VALUES
        rows = np.array([[1 + index + 0.25 * token + 0.01 * i for i in range(values)] for token in tokens], np.float32)
        bits = rows.view(np.uint32).reshape(1, 1, len(tokens), values).copy()
        for row, token in enumerate(tokens):
            bits[0, 0, row, 1:2] += np.uint32(moved.get((name, token), 0))
        stores = op == "SET_ROWS"
        made.append(
            Node(
                name=name,
                op=op,
                type="f16" if stores else "f32",
                shape=(values, 512 if stores else len(tokens), 1, 1),
                address=100 + index,
                root=CACHE if stores else 100 + index,
                sources=tuple(INPUT if s == -1 else CACHE if s == -2 else 100 + s for s in sources),
                weight=f"{name}.weight" if op == "MUL_MAT" else "",
                weight_type="q6_K" if op == "MUL_MAT" else "f32",
                buffer="CPU",
                bits=None if stores else bits,
            )
        )
    return made


def lone(ops: Ops, tokens: int, cells: list[int] | None = None) -> list[list[Node]]:
    """The lone passes of tokens 0, 1, ...; ``cells`` gives each its mask's length."""
    return [graph(ops, [t], {}, cells[t] if cells else 0) for t in range(tokens)]
