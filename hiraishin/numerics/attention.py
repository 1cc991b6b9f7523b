"""Attention over a cut-up KV cache: which part sums which cells, and the float32 bits that come out.

Two kernels of llama.cpp are followed here.

*GPU* (`flash_attn_ext_vec` and `flash_attn_combine_results`, ggml-cuda/fattn-vec.cuh and fattn-common.cuh): block y of
P takes the 128-cell chunks y, y + P, ...; it keeps its own running maximum and sum; a second kernel merges the P
partial results in order. The grouping and the order of every addition follow the kernel. Its exponential does not: the
GPU's `expf` is an approximate instruction, this one is rounded correctly. So equality between two values of P is a
statement about grouping; the bits are this model's own, not a GPU's.

*CPU* (`ggml_compute_forward_flash_attn_ext_f16_one_chunk` and `ggml_flash_attn_ext_reduce_partials`, ggml-cpu/ops.cpp):
for one query the padded range is cut into as many chunks as there are threads once it has 512 cells; for several
queries it is not. This model is meant to match the x86 AVX2 + FMA kernel bit for bit; a test holds it against the real
library."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .floats import F32, fma32
from .occupancy import CHUNK, chunk_owners, padded

Exp = Callable[[Any], Any]
F16 = NDArray[np.float16]
SPLIT_FROM = 512  # padded cells from which the CPU splits the range of a lone query (`use_split_kv_path`)
_LOWEST = np.float32(-np.finfo(np.float32).max / 2)
_OFFSET = np.float32(np.float32(3.0) * np.float32(0.6931))  # FATTN_KQ_MAX_OFFSET


def exp32(x: F32) -> F32:
    """Correctly rounded float32 exponential (through float64)."""
    with np.errstate(under="ignore", over="ignore"):
        return np.exp(np.asarray(x, np.float64)).astype(np.float32)


@functools.cache
def _libm() -> ctypes.CDLL:
    libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    libm.expf.restype, libm.expf.argtypes = ctypes.c_float, [ctypes.c_float]
    return libm


def exp_of_libm(x: F32) -> F32:
    """The C library's `expf`, which the CPU kernel calls (within half a unit in the last place plus a little)."""
    return np.array([_libm().expf(float(v)) for v in np.asarray(x, np.float32).reshape(-1)], np.float32).reshape(
        np.shape(x)
    )


@dataclass(frozen=True)
class Partial:
    """One part's running maximum, sum of exponentials and weighted values [head size], before the merge."""

    cells: tuple[int, ...]
    maximum: np.float32
    total: np.float32
    values: F32


@dataclass(frozen=True)
class Attention:
    """An attention output [head size] with the partial results it was merged from."""

    output: F32
    partials: tuple[Partial, ...]


def made_up_cache(cells: int, head: int, seed: int = 0) -> tuple[F32, F16, F16]:
    """A query [head], keys and values [cells, head] drawn from a normal distribution, the same for ever (legacy generator)."""
    rng = np.random.RandomState(seed)
    q = rng.standard_normal(head).astype(np.float32) * np.float32(2)
    k = rng.standard_normal((cells, head)).astype(np.float16)
    v = rng.standard_normal((cells, head)).astype(np.float16)
    return q, k, v


def _reduce_lanes(lanes: F32) -> np.float32:
    for offset in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[np.arange(32) ^ offset]
    return np.float32(lanes[0])


def gpu_attention(q: F32, k: F16, v: F16, position: int, p: int, *, exp: Exp = exp32) -> Attention:
    """Attention of a query at ``position`` (it sees cells 0..position) over P = ``p`` parallel blocks of 128-cell chunks.

    ``k`` and ``v`` are [cells, head] with cells padded to 256 by the caller or not; masked cells add exact zeros.
    Lane sums, warp order and the merge follow the kernel; dot products q.k are summed in float64 and rounded once.
    """
    cells = padded(position + 1)
    scale = np.float32(1 / np.sqrt(q.size))
    seen = min(position + 1, k.shape[0])
    scores = np.full(cells, -np.inf, np.float32)
    scores[:seen] = (k[:seen].astype(np.float64) @ (q * scale).astype(np.float64)).astype(np.float32)
    values = np.zeros((cells, q.size), np.float32)
    values[:seen] = v[:seen].astype(np.float32)
    owners = chunk_owners(cells, p)
    partials = tuple(
        _gpu_block(scores, values, [c for c, owner in enumerate(owners) if owner == y], exp) for y in range(p)
    )
    top = max(part.maximum for part in partials)
    numerator, denominator = np.zeros(q.size, np.float32), np.float32(0)
    for part in partials:
        factor = exp(np.float32(part.maximum - top))
        numerator = fma32(factor, part.values, numerator)
        denominator = np.float32(fma32(factor, part.total, denominator))
    return Attention((numerator / denominator).astype(np.float32), partials)


def _gpu_block(scores: F32, values: F32, chunks: list[int], exp: Exp) -> Partial:
    """One block: 4 warps of 32 threads, a cell a thread; in a warp 4 groups of 8 threads add the values of every fourth cell."""
    maximum = np.full(4, _LOWEST, np.float32)  # a warp's running maximum: the block shares none until the end
    sums = np.zeros((4, 32), np.float32)
    acc = np.zeros((4, 4, values.shape[1]), np.float32)
    for c in chunks:
        s = scores[c * CHUNK : (c + 1) * CHUNK].reshape(4, 32)
        v = values[c * CHUNK : (c + 1) * CHUNK].reshape(4, 8, 4, -1)  # warp, step, group
        new = np.maximum(maximum, (s + _OFFSET).max(axis=1)).astype(np.float32)
        rescale = exp((maximum - new).astype(np.float32))
        weights = exp((s - new[:, None]).astype(np.float32))
        maximum = new
        sums = fma32(sums, rescale[:, None], weights)
        acc = (acc * rescale[:, None, None]).astype(np.float32)
        w = weights.reshape(4, 8, 4)
        for step in range(8):
            acc = fma32(v[:, step], w[:, step, :, None], acc)
    top = np.float32(maximum.max())
    rescale = exp((maximum - top).astype(np.float32))
    acc = (acc * rescale[:, None, None]).astype(np.float32)
    warps = np.zeros(32, np.float32)
    warps[:4] = [_reduce_lanes((sums[w] * rescale[w]).astype(np.float32)) for w in range(4)]
    total = np.zeros(values.shape[1], np.float32)
    for w in range(4):
        for group in range(4):
            total = total + acc[w, group]
    cells = tuple(cell for c in chunks for cell in range(c * CHUNK, (c + 1) * CHUNK))
    return Partial(cells, top, _reduce_lanes(warps), total)


def cpu_chunks(cells: int, threads: int, queries: int = 1) -> list[tuple[int, int]]:
    """The ranges [start, stop) the CPU sums apart: padded range over threads for a lone query from 512 cells on, else one."""
    if queries != 1 or cells < SPLIT_FROM:
        return [(0, cells)]
    size = -(-cells // threads)
    return [(start, min(start + size, cells)) for start in range(0, cells, size)]


def dot_f16_avx2(x: F32, y: F32) -> F32:
    """`ggml_vec_dot_f16` with AVX2 and FMA: four accumulators of eight lanes, folded 4 to 1, then 8 lanes to 1.

    ``x`` [..., n] and ``y`` [n] hold half-precision values as float32; n is a multiple of 32.
    """
    n = y.size
    if n % 32:
        raise ValueError(f"the head size is a multiple of 32 here, not {n}")
    acc = np.zeros((*x.shape[:-1], 4, 8), np.float32)
    for i in range(0, n, 32):
        acc = fma32(x[..., i : i + 32].reshape(*x.shape[:-1], 4, 8), y[i : i + 32].reshape(4, 8), acc)
    folded = acc[..., :2, :] + acc[..., 2:, :]
    eight = folded[..., 0, :] + folded[..., 1, :]
    four = eight[..., :4] + eight[..., 4:]
    two = four[..., 0::2] + four[..., 1::2]
    result: F32 = (two[..., 0] + two[..., 1]).astype(np.float32)
    return result


Contraction = Literal["none", "old", "new"]
"""How the compiler turned ``a*b + c*d`` of the merge into machine code: not fused, or the old or the new term's product fused."""


def _merge(old: F32, scale_old: np.float32, new: F32, scale_new: np.float32, how: Contraction) -> F32:
    if how == "old":
        return fma32(old, scale_old, np.float32(1) * (new * scale_new).astype(np.float32))
    if how == "new":
        return fma32(new, scale_new, (old * scale_old).astype(np.float32))
    return ((old * scale_old).astype(np.float32) + (new * scale_new).astype(np.float32)).astype(np.float32)


def cpu_attention(
    q: F32,
    k: F16,
    v: F16,
    position: int,
    threads: int,
    *,
    queries: int = 1,
    cells: int | None = None,
    exp: Exp = exp_of_libm,
    merge: Contraction = "old",
    merge_sum: Contraction = "old",
) -> Attention:
    """Attention of a query at ``position`` on the CPU: alone (``queries`` = 1) or as one of several in a pass.

    ``k`` and ``v`` are half precision [>= position + 1, head]. ``cells`` is the attended range (default: padded to 256).
    Values are accumulated in half precision, as the kernel does.
    """
    cells = padded(position + 1) if cells is None else cells
    scale = np.float32(np.float32(1) / np.sqrt(np.float32(q.size)))
    half_q = q.astype(np.float16).astype(np.float32)
    ranges = cpu_chunks(cells, threads, queries)
    partials = tuple(
        _cpu_chunk(half_q, k, v, range(start, min(stop, position + 1)), scale, exp) for start, stop in ranges
    )
    if len(ranges) == 1:
        part = partials[0]
        inverse = np.float32(1) / part.total
        return Attention((part.values * inverse).astype(np.float32), partials)
    top, total, values = np.float32(-np.inf), np.float32(0), np.zeros(q.size, np.float32)
    for part in partials:
        if part.total == 0:
            continue
        new_top = np.maximum(top, part.maximum)
        scale_old, scale_new = exp(np.float32(top - new_top)), exp(np.float32(part.maximum - new_top))
        values = _merge(values, np.float32(scale_old), part.values, np.float32(scale_new), merge)
        total = np.float32(
            _merge(np.asarray(total), np.float32(scale_old), np.asarray(part.total), np.float32(scale_new), merge_sum)
        )
        top = new_top
    return Attention((values * (np.float32(1) / total)).astype(np.float32), partials)


def _cpu_chunk(q: F32, k: F16, v: F16, cells: range, scale: np.float32, exp: Exp) -> Partial:
    """One chunk, cell by cell: online softmax with a half-precision accumulator."""
    maximum, total = np.float32(-np.inf), np.float32(0)
    acc = np.zeros(q.size, np.float16)
    span = slice(cells.start, max(cells.stop, cells.start))
    scores = (dot_f16_avx2(k[span].astype(np.float32), q) * scale).astype(np.float32)
    for s, value in zip(scores, v[span].astype(np.float32), strict=True):
        if s > maximum:
            rescale, weight = np.float32(exp(np.float32(maximum - s))), np.float32(1)
            maximum = s
            acc = (acc.astype(np.float32) * rescale).astype(np.float16)
        else:
            rescale, weight = np.float32(1), np.float32(exp(np.float32(s - maximum)))
        acc = fma32(value, weight, acc.astype(np.float32)).astype(np.float16)
        total = np.float32(fma32(total, rescale, weight))
    return Partial(tuple(cells), maximum, total, acc.astype(np.float32))
