"""Real Q6_K rows and real activations, stored so that the float-order figure needs no model.

The rows come from SmolLM2-135M-Instruct requantized to Q6_K, whose only Q6_K matrices are `ffn_down` with 1,536 inputs
(6 blocks). The post speaks of 4,096 inputs (16 blocks), so each stored row is honest patchwork: two whole matrix rows
and the first four blocks of a third, one after the other. The activations are what that matrix really received while
the model read a sentence (last token, the one before, and the first 1,024 numbers of the one before that), in the same
order."""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .floats import F32, bits
from .matvec import BLOCK_BYTES, mul_mat_vec_q6_k, nwarps_for, quantize_q8_1

BLOCKS = 16


@dataclass(frozen=True)
class RealRow:
    """A packed Q6_K row of 4,096 weights with the activations it meets: float32, and as q8_1 quants and scales."""

    packed: bytes
    activations: F32
    quants: NDArray[np.int8]
    scales8: NDArray[np.float16]
    source: str


@functools.cache
def _stored() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("q6_k_rows.json").read_text(encoding="utf-8")
    stored: dict[str, Any] = json.loads(text)
    return stored


def real_rows() -> int:
    """How many rows are stored."""
    return len(_stored()["rows"])


def real_row(index: int = 0) -> RealRow:
    """A stored row.

    Raises ValueError when there is no such row.
    """
    stored = _stored()
    if not 0 <= index < len(stored["rows"]):
        raise ValueError(f"rows 0 to {len(stored['rows']) - 1} are stored, not {index}")
    activations = np.frombuffer(base64.b64decode(stored["activations"]), "<f4").astype(np.float32)
    quants, scales8 = quantize_q8_1(activations)
    first = 3 * index
    source = f"{stored['model']} {stored['tensor']}, matrix rows {first}, {first + 1} and {first + 2} joined and cut at 4,096"
    return RealRow(base64.b64decode(stored["rows"][index]), activations, quants, scales8, source)


def row_results(index: int = 0) -> pd.DataFrame:
    """The stored row's result for every number of tokens that `mul_mat_vec_q` serves, fused and not: warps, value, bits."""
    row = real_row(index)
    rows = []
    for tokens in range(1, 9):
        warps = nwarps_for(tokens)
        fused, plain = (
            mul_mat_vec_q6_k(row.packed, row.quants, row.scales8, warps, fused=f).value for f in (True, False)
        )
        rows.append(
            {
                "tokens": tokens,
                "warps": warps,
                "fused": fused,
                "bits, fused": bits(fused),
                "not fused": plain,
                "bits, not fused": bits(plain),
            }
        )
    return pd.DataFrame(rows).set_index("tokens")


def joined_row(model: Path, tensor: str, first: int) -> bytes:
    """Read matrix rows ``first``, ``first + 1``, ... of a Q6_K tensor in a GGUF file and join them to 16 blocks.

    Raises ValueError when the tensor is missing, is not Q6_K, or has too few rows.
    """
    from gguf import GGUFReader

    for t in GGUFReader(str(model)).tensors:
        if t.name == tensor:
            if t.tensor_type.name != "Q6_K":
                raise ValueError(f"{tensor} is {t.tensor_type.name}, not Q6_K")
            flat = np.asarray(t.data).reshape(-1, t.data.shape[-1])
            joined = flat[first : first + 1 + BLOCKS * BLOCK_BYTES // flat.shape[1]].tobytes()[: BLOCKS * BLOCK_BYTES]
            if len(joined) < BLOCKS * BLOCK_BYTES:
                raise ValueError(f"{tensor} has no {BLOCKS} blocks from row {first} on")
            return joined
    raise ValueError(f"no tensor {tensor} in {model.name}")
