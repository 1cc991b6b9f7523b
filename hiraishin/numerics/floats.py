"""32-bit floating point, looked at closely: spacing, order of addition, exact fused multiply-add, bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]


def spacing(x: float) -> float:
    """Distance from ``x`` (rounded to float32) to the next float32 away from zero."""
    return float(np.spacing(np.float32(x)))


def sum_in_order(values: Sequence[float], order: Sequence[int] | None = None) -> np.float32:
    """Add float32 ``values`` one after the other, in the given order of indices, rounding after every addition.

    Raises ValueError when ``order`` is not a permutation of the indices.
    """
    order = range(len(values)) if order is None else order
    if sorted(order) != list(range(len(values))):
        raise ValueError(f"not an order of {len(values)} values: {list(order)}")
    total = np.float32(0)
    for i in order:
        total = np.float32(total + np.float32(values[i]))
    return total


def fma32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> F32:
    """``a * b + c`` in float32 with one rounding, elementwise: what a GPU's FFMA and a CPU's vfmadd compute.

    A product of two float32 is exact in float64. Their sum with ``c`` is not, and rounding it twice (to 53 bits, then to 24) can
    differ from rounding it once. So the first rounding is made *to odd*, which the second cannot mistake for a tie
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        p = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        q = np.asarray(c, np.float32).astype(np.float64)
        p, q = np.broadcast_arrays(p, q)
        total = p + q
        # Knuth's two-sum: `error` is exactly what the addition lost.
        back = total - p
        error = (p - (total - back)) + (q - back)
        even = (
            (total.view(np.uint64) & np.uint64(1)) == 0
            if total.ndim
            else (np.atleast_1d(total).view(np.uint64)[0] & np.uint64(1)) == 0
        )
        towards = np.where(error > 0, np.inf, -np.inf)
        odd = np.where((error != 0) & even & np.isfinite(total), np.nextafter(total, towards), total)
        return odd.astype(np.float32)


def bits(x: ArrayLike) -> str | list[str]:
    """The float32 bit pattern as eight hexadecimal digits; a list of them for an array."""
    array = np.asarray(x, np.float32)
    if array.ndim == 0:
        return f"{int(array.reshape(1).view(np.uint32)[0]):08x}"
    return [f"{int(v):08x}" for v in np.ascontiguousarray(array).reshape(-1).view(np.uint32)]
