"""One row of a Q6_K matrix times one activation column, as llama.cpp's CUDA kernel `mul_mat_vec_q` adds it up.

The kernel (ggml-cuda/mmvq.cu) deals the row's blocks of 256 weights out to warps: warp w takes blocks w, w + nwarps, w
+ 2 nwarps, and so on. Inside a block each of the 32 lanes handles 8 weights (vecdotq.cuh, `vec_dot_q6_K_q8_1`: VDR 1,
QI 32) as two `dp4a` integer dot products. Integers come out the same in any order; floats appear where each lane scales
them:

    sumf  = d8[0]*float(dot0*sc0) + d8[1]*float(dot1*sc1)
    acc  += d * sumf

At the end warps 1.. hand their 32 accumulators to warp 0, which adds them in warp order, and a 5-step xor shuffle folds
the lanes.

Assumption about the compiler: nvcc contracts multiply-add (`-fmad=true`, its default), so each of the three additions
above is one fused operation. ``fused=False`` gives the arithmetic without contraction; a dump of a real GPU row decides
between them. Denormals are kept here; llama.cpp compiles with -use_fast_math, which flushes them to zero (real rows
hold none)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .floats import F32, fma32

QK_K = 256  # weights in a k-quant block
QK8_1 = 32  # activations in a q8_1 block
WARP = 32  # lanes in a warp
BLOCK_BYTES = 210  # block_q6_K: ql[128], qh[64], scales[16], half d
QI6_K = 32  # 4-byte integers of low quants in a block; with VDR 1 also the lanes that share one block
BLOCKS_PER_8_1 = QK_K // QK8_1


@dataclass(frozen=True)
class MatVec:
    """What the kernel computed, step by step.

    ``value`` is the output. ``partials`` [nwarps, 32] are the lane accumulators before the hand-over, ``lanes`` [32] warp 0's
    after it, ``terms`` [blocks, 32] the scaled sum each lane adds for each block, ``blocks_of`` the blocks of each warp in the
    order they were added.
    """

    value: np.float32
    nwarps: int
    partials: F32
    lanes: F32
    terms: F32
    blocks_of: tuple[tuple[int, ...], ...]


def nwarps_for(columns: int) -> int:
    """Warps a block of `mul_mat_vec_q` has for this number of columns (tokens in the pass), NVIDIA except Turing and GB10.

    Source: `calc_nwarps`, MMVQ_PARAMETERS_GENERIC. Raises ValueError outside 1..8, where another kernel takes over.
    """
    if not 1 <= columns <= 8:
        raise ValueError(f"mul_mat_vec_q takes 1 to 8 columns, not {columns}")
    return 4 if columns <= 4 else 2


def warp_blocks(blocks: int, nwarps: int) -> tuple[tuple[int, ...], ...]:
    """Which blocks of a row each warp sums, in order: ``kbx = tid/QI; kbx += blocks_per_iter`` with blocks_per_iter = nwarps."""
    if blocks < 1 or nwarps < 1:
        raise ValueError(f"need at least one block and one warp, got {blocks} and {nwarps}")
    return tuple(tuple(range(w, blocks, nwarps)) for w in range(nwarps))


def quantize_q8_1(x: F32) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Activations to q8_1: int8 in blocks of 32 and one half-precision scale a block (`quantize_q8_1` in ggml-cuda/quantize.cu).

    The GPU divides approximately (-use_fast_math); this divides exactly, so a quant may differ by one where ``x/d`` lies
    next to a half. The mat-vec model takes quants and scales as its input for that reason. Returns quants [n] and scales [n/32].
    """
    x = np.asarray(x, np.float32)
    if x.ndim != 1 or x.size % QK8_1:
        raise ValueError(f"activations come as one row of whole blocks of {QK8_1}, not shape {x.shape}")
    blocks = x.reshape(-1, QK8_1)
    d = (np.abs(blocks).max(axis=1) / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(d[:, None] == 0, np.float32(0), blocks / d[:, None])
    # C's roundf: halves away from zero; numpy's rint would take them to even.
    q = np.trunc(ratio + np.copysign(np.float32(0.5), ratio)).astype(np.int8)
    return q.reshape(-1), d.astype(np.float16)


def unpack_q6_k(row: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int8], F32]:
    """Split a row of packed Q6_K blocks into ql [n, 128], qh [n, 64], scales [n, 16] and d [n]."""
    if not row or len(row) % BLOCK_BYTES:
        raise ValueError(f"a Q6_K row is a multiple of {BLOCK_BYTES} bytes, not {len(row)}")
    packed = np.frombuffer(row, np.uint8).reshape(-1, BLOCK_BYTES)
    d = np.ascontiguousarray(packed[:, 208:210]).view(np.float16).astype(np.float32).reshape(-1)
    return packed[:, :128], packed[:, 128:192], packed[:, 192:208].view(np.int8), d


def lane_terms(
    row: bytes, quants: NDArray[np.int8], scales8: NDArray[np.float16], *, fused: bool = True
) -> tuple[F32, F32]:
    """``sumf`` of every block and lane [blocks, 32], and each block's d [blocks]; `vec_dot_q6_K_q8_1` for iqs = lane."""
    ql, qh, scales, d = unpack_q6_k(row)
    blocks = ql.shape[0]
    if quants.shape != (blocks * QK_K,) or scales8.shape != (blocks * BLOCKS_PER_8_1,):
        raise ValueError(
            f"{blocks} blocks of weights need {blocks * QK_K} activations in {blocks * BLOCKS_PER_8_1} blocks"
        )
    q8 = quants.astype(np.int32).reshape(blocks, BLOCKS_PER_8_1, 8, 4)  # 8 integers of 4 quants in a q8_1 block
    d8 = scales8.astype(np.float32).reshape(blocks, BLOCKS_PER_8_1)
    lane = np.arange(WARP)
    half, rest = lane // (QI6_K // 2), lane % (QI6_K // 2)
    column_block = 4 * half + rest // (QI6_K // 4)
    scale_at = (QI6_K // 4) * half + rest // (QI6_K // 8)
    shift = 2 * (rest // (QI6_K // 4))
    low = ql.reshape(blocks, WARP, 4).astype(np.int32)  # vl: lane's four bytes
    high = (
        qh.reshape(blocks, 16, 4).astype(np.int32)[:, (QI6_K // 4) * half + lane % (QI6_K // 4)] >> shift[None, :, None]
    )  # vh

    sumf = np.zeros((blocks, WARP), np.float32)
    for i in range(2):  # QR6_K: the low, then the high nibble of the same bytes, one scale each
        weights = ((low >> (4 * i)) & 0x0F | ((high >> (4 * i)) & 0x03) << 4) - 32
        dot = (weights * q8[:, column_block + 2 * i, lane % 8]).sum(axis=2)  # dp4a: exact integers
        scaled = (dot * scales[:, scale_at + 4 * i].astype(np.int32)).astype(np.float32)  # below 2^24: exact too
        factor = d8[:, column_block + 2 * i]
        sumf = fma32(factor, scaled, sumf) if fused else (factor * scaled).astype(np.float32) + sumf
    return sumf, d


def mul_mat_vec_q6_k(
    row: bytes, quants: NDArray[np.int8], scales8: NDArray[np.float16], nwarps: int, *, fused: bool = True
) -> MatVec:
    """Sum one Q6_K row against one q8_1 column the way ``nwarps`` warps do, rounding where the kernel rounds.

    ``row`` is the packed row (210 bytes a block), ``quants`` int8 [256 * blocks], ``scales8`` half [8 * blocks].
    """
    sumf, d = lane_terms(row, quants, scales8, fused=fused)
    blocks_of = warp_blocks(sumf.shape[0], nwarps)
    partials = np.zeros((nwarps, WARP), np.float32)
    for warp, blocks in enumerate(blocks_of):
        acc = np.zeros(WARP, np.float32)
        for b in blocks:
            acc = fma32(d[b], sumf[b], acc) if fused else (acc + (d[b] * sumf[b]).astype(np.float32)).astype(np.float32)
        partials[warp] = acc
    lanes = partials[0].copy()
    for warp in range(1, nwarps):
        lanes = lanes + partials[warp]
    value = fold_lanes(lanes)
    return MatVec(value, nwarps, partials, lanes, (d[:, None] * sumf).astype(np.float32), blocks_of)


def fold_lanes(lanes: F32) -> np.float32:
    """`warp_reduce_sum`: five xor shuffles, offsets 16, 8, 4, 2, 1; every lane ends with the same number."""
    lanes = np.asarray(lanes, np.float32).copy()
    for offset in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[np.arange(WARP) ^ offset]
    return np.float32(lanes[0])


def lane_products(row: bytes, quants: NDArray[np.int8], scales8: NDArray[np.float16]) -> list[float]:
    """Every scaled group of 16 weights as an exact float64: d * d8 * scale * dot. Their exact sum is what a perfect adder gives.

    A float16 times a float16 has 22 bits, the integer below 22 more: the product fits float64 without rounding.
    """
    ql, qh, scales, d = unpack_q6_k(row)
    blocks = ql.shape[0]
    low = ql.reshape(blocks, 2, 64).astype(np.int32)
    high = qh.reshape(blocks, 2, 32).astype(np.int32)
    weights = np.empty((blocks, 2, 128), np.int32)
    for i in range(4):  # the four runs of 32 weights in each half block, as in `dequantize_row_q6_K`
        nibble = (low[:, :, 32 * (i % 2) : 32 * (i % 2) + 32] >> (4 * (i // 2))) & 0x0F
        weights[:, :, 32 * i : 32 * i + 32] = nibble | ((high >> (2 * i)) & 3) << 4
    grouped = (weights - 32).reshape(blocks, 16, 16)
    dots = (grouped * quants.astype(np.int32).reshape(blocks, 16, 16)).sum(axis=2) * scales.astype(np.int32)
    factor = d.astype(np.float64)[:, None] * np.repeat(scales8.astype(np.float64).reshape(blocks, 8), 2, axis=1)
    return [float(v) for v in (factor * dots).reshape(-1)]
