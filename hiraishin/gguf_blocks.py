"""Quantized weights without a quantizer library: banks of valid ggml blocks drawn from a seeded distribution.

Why not ggml's own quantizer: its last bits depend on how a build's compiler contracts ``a*b + c*d``, it needs a
native build before the first test can run, and it takes minutes for 5 GB. Here numpy alone decides every byte,
with integer draws and single IEEE operations, so a file has the same sha256 on every machine. Timing and
bit-exactness do not depend on how well the blocks approximate the numbers they were drawn for.

* ``Q2_K`` to ``Q6_K`` and ``IQ4_NL`` are quantized here, round to nearest (no search for better scales).
* ``Q4_0`` to ``Q8_0`` and ``MXFP4`` go through the ``gguf`` package.
* The remaining types (the other ``IQ*``, ``NVFP4``, ``Q1_0``, ``Q2_0``) get random codes, every one of which is valid, and a
  scale that brings their spread to the wanted one.

Block layouts follow ``ggml-common.h`` of ggml 0.25; the tests dequantize every bank with the ``gguf`` package.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from hiraishin.gguf_tables import GGML_TYPES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK = 1 << 11  # blocks of 256 at a time: what fits the second-level cache
_BY_NAME = {name: (block, size) for name, block, size in GGML_TYPES.values()}
# fmt: off
_RANDOM_CODES = {
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "NVFP4", "Q1_0", "Q2_0",
}
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         *sorted(_RANDOM_CODES))
# fmt: on
"""Types that :func:`bank` can make: all that ggml's CUDA mat-vec kernel has, and the three float types."""


def block_of(name: str) -> tuple[int, int]:
    """Weights a block and bytes a block of a ggml type.

    Raises:
        KeyError: no such type.
    """
    return _BY_NAME[name]


def normal(count: int, seed: int) -> Floats:
    """``count`` draws from a distribution close to N(0, 1): sums of eight 16-bit integers.

    Raw generator words and integer sums are the same on every machine and in every numpy; ``standard_normal``
    promises neither.
    """
    words = np.random.PCG64(seed).random_raw(2 * count).view(np.uint16).reshape(8, count)
    sums = words.sum(axis=0, dtype=np.int32) - np.int32(8 * 65535 // 2)
    spread = np.float32((8 * (65536**2 - 1) / 12) ** 0.5)
    return np.asarray(sums.astype(np.float32) / spread)


def bank(name: str, blocks: int, sigma: float, seed: int) -> Bytes:
    """Blocks of a ggml type whose weights have mean 0 and standard deviation about ``sigma``.

    Args:
        name: the type, one of :data:`TYPES`.
        blocks: how many blocks (of :func:`block_of` weights each).
        sigma: the spread, best a power of two.
        seed: same seed, same bytes.

    Returns:
        uint8 ``[blocks, bytes a block]``.

    Raises:
        KeyError: the type is unknown or cannot be made.
    """
    if name not in TYPES:
        raise KeyError(name)
    weights, size = block_of(name)
    out = np.empty((blocks, size), np.uint8)
    step = max(1, _CHUNK * 256 // weights)
    for index, start in enumerate(range(0, blocks, step)):
        count = min(step, blocks - start)
        piece_seed = (seed << 20) + index
        if name in _RANDOM_CODES:
            out[start : start + count] = _random_codes(name, count, sigma, piece_seed)
        else:
            values = normal(count * weights, piece_seed).reshape(count, weights) * np.float32(sigma)
            out[start : start + count] = quantize(name, values)
    return out


def quantize(name: str, values: Floats) -> Bytes:
    """Quantize float32 ``[blocks, weights a block]`` to uint8 ``[blocks, bytes a block]``, round to nearest.

    Raises:
        KeyError: the type has no quantizer here (see the module's docstring).
    """
    own = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl}
    if name in own:
        return own[name](values)
    if name == "F32":
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    if name == "F16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)
    if name == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16).view(np.uint8)
    if name in _RANDOM_CODES:
        raise KeyError(name)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize as by_gguf

    made = by_gguf(values.reshape(values.shape[0], -1), GGMLQuantizationType[name])
    return np.ascontiguousarray(made).view(np.uint8).reshape(values.shape[0], -1)


def _half(values: Floats) -> Bytes:
    """float32 ``[blocks]`` as float16 bytes ``[blocks, 2]``."""
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8).reshape(-1, 2)


def _round_half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _affine(values: Floats, sub: int, levels: int, scale_max: int) -> tuple[Floats, Floats, Bytes, Bytes, Bytes]:
    """``x = d*scale*q - dmin*min`` per sub-block: d, dmin ``[n]``; scales, mins ``[n, sub-blocks]``; q ``[n, 256]``."""
    x = values.reshape(len(values), -1, sub)
    low = np.minimum(x.min(axis=2), 0)
    scale = (x.max(axis=2) - low) / np.float32(levels)
    d, dmin = _round_half(scale.max(axis=1) / scale_max), _round_half(-low.min(axis=1) / scale_max)
    scales = _codes(scale, d[:, None], 1, scale_max)
    mins = _codes(-low, dmin[:, None], 0, scale_max)
    step = d[:, None] * scales
    q = _codes(x + (dmin[:, None] * mins)[:, :, None], step[:, :, None], 0, levels)
    return d, dmin, scales, mins, q.reshape(len(values), -1)


def _codes(values: Floats, unit: Floats, low: int, high: int) -> Bytes:
    """``values / unit`` to the nearest code in ``[low, high]``; a unit of 0 gives ``low``."""
    ratio = np.divide(values, unit, out=np.zeros_like(values), where=unit != 0)
    return np.clip(np.rint(ratio), low, high).astype(np.uint8)


def _six_bits(scales: Bytes, mins: Bytes) -> Bytes:
    """Eight 6-bit scales and eight 6-bit mins in the 12 bytes of Q4_K and Q5_K."""
    return np.concatenate(
        [
            (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6),
            (mins[:, :4] & 63) | (mins[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4),
        ],
        axis=1,
    )


def _q4_k(values: Floats) -> Bytes:
    d, dmin, scales, mins, q = _affine(values, 32, 15, 63)
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([_half(d), _half(dmin), _six_bits(scales, mins), nibbles], axis=1)


def _q5_k(values: Floats) -> Bytes:
    d, dmin, scales, mins, q = _affine(values, 32, 31, 63)
    groups = q.reshape(-1, 8, 32)
    high = np.zeros((len(q), 32), np.uint8)
    for index in range(8):
        high |= (groups[:, index] >> 4) << index
    pairs = (groups & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([_half(d), _half(dmin), _six_bits(scales, mins), high, nibbles], axis=1)


def _q2_k(values: Floats) -> Bytes:
    d, dmin, scales, mins, q = _affine(values, 16, 3, 15)
    parts = q.reshape(-1, 2, 4, 32)
    packed = parts[:, :, 0] | (parts[:, :, 1] << 2) | (parts[:, :, 2] << 4) | (parts[:, :, 3] << 6)
    return np.concatenate([scales | (mins << 4), packed.reshape(-1, 64), _half(d), _half(dmin)], axis=1)


def _symmetric(values: Floats, half_levels: int, scale_max: int) -> tuple[Floats, Bytes, Bytes]:
    """``x = d*scale*(q - half_levels)`` per 16 weights: d ``[n]``, scales ``[n, 16]``, q ``[n, 256]``."""
    x = values.reshape(len(values), 16, 16)
    scale = np.abs(x).max(axis=2) / np.float32(half_levels - 1)
    d = _round_half(scale.max(axis=1) / scale_max)
    scales = _codes(scale, d[:, None], 1, scale_max)
    step = (d[:, None] * scales)[:, :, None]
    ratio = np.divide(x, step, out=np.zeros_like(x), where=step != 0)
    q = np.clip(np.rint(ratio), -half_levels, half_levels - 1) + half_levels
    return d, scales, q.astype(np.uint8).reshape(len(values), -1)


def _q3_k(values: Floats) -> Bytes:
    d, scales, q = _symmetric(values, 4, 31)
    shifted = scales + np.uint8(32)
    low = (shifted[:, :8] & 15) | ((shifted[:, 8:] & 15) << 4)
    quarters = shifted.reshape(-1, 4, 4) >> 4
    high = quarters[:, 0] | (quarters[:, 1] << 2) | (quarters[:, 2] << 4) | (quarters[:, 3] << 6)
    groups = q.reshape(-1, 8, 32)
    mask = np.zeros((len(q), 32), np.uint8)
    for index in range(8):
        mask |= (groups[:, index] >> 2) << index
    parts = (groups & 3).reshape(-1, 2, 4, 32)
    packed = parts[:, :, 0] | (parts[:, :, 1] << 2) | (parts[:, :, 2] << 4) | (parts[:, :, 3] << 6)
    return np.concatenate([mask, packed.reshape(-1, 64), low, high, _half(d)], axis=1)


def _q6_k(values: Floats) -> Bytes:
    d, scales, q = _symmetric(values, 32, 127)
    parts = q.reshape(-1, 2, 4, 32)
    low, high = parts & 15, parts >> 4
    nibbles = np.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], axis=2)
    pairs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    return np.concatenate([nibbles.reshape(-1, 128), pairs.reshape(-1, 64), scales, _half(d)], axis=1)


_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # kvalues_iq4nl


def _iq4_nl(values: Floats) -> Bytes:
    d = _round_half(np.abs(values).max(axis=1) / np.float32(113))
    ratio = np.divide(values, d[:, None], out=np.zeros_like(values), where=d[:, None] != 0)
    codes = np.searchsorted((_IQ4_VALUES[1:] + _IQ4_VALUES[:-1]) / 2, ratio).astype(np.uint8)
    return np.concatenate([_half(d), codes[:, :16] | (codes[:, 16:] << 4)], axis=1)


def _random_codes(name: str, count: int, sigma: float, seed: int) -> Bytes:
    size = block_of(name)[1]
    words = np.random.PCG64(seed).random_raw(-(-count * (size + 1) // 8)).view(np.uint8)
    blocks = words[: count * size].reshape(count, size).copy()
    vary = words[count * size : count * (size + 1)]  # each block's scale lies within a quarter of the mean
    if name == "NVFP4":
        # Four E4M3 scales a block: neighbouring codes around the wanted one. E2M1 codes have a spread of 2.93.
        near = (np.frexp(sigma / 2.93)[1] - 1 + 7 << 3) + int((np.frexp(sigma / 2.93)[0] * 2 - 1) * 8)
        blocks[:, :4] = np.clip(near, 4, 120) - 2 + blocks[:, :4] % 5
        return blocks
    if name == "Q2_0":
        # Codes -1, 0, 1, 2, drawn so that their mean is 0 and their spread 1.
        table = np.array([0] * 6 + [1] * 6 + [2] * 2 + [3] * 2, np.uint8)
        codes = table[np.random.PCG64(seed + 1).random_raw(count * 8).view(np.uint8).reshape(count, 16, 4) & 15]
        blocks[:, 2:] = codes[:, :, 0] | (codes[:, :, 1] << 2) | (codes[:, :, 2] << 4) | (codes[:, :, 3] << 6)
    d = np.float32(sigma / _spread(name)) * (np.float32(0.75) + vary.astype(np.float32) / np.float32(512))
    halves = _half(d)
    if name == "IQ1_M":
        # The four nibbles of the scale sit in the top nibbles of the four 16-bit scale words.
        bits = halves.view(np.uint16)[:, 0]
        for index in range(4):
            byte = 48 + 2 * index + 1
            blocks[:, byte] = (blocks[:, byte] & 15) | ((bits >> (4 * index)) & 15).astype(np.uint8) << 4
    else:
        blocks[:, :2] = halves
    return blocks


# fmt: off
_SCALES = {
    "Q4_0": (0,), "IQ4_NL": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}
# fmt: on
"""Where a block keeps its 16-bit scales."""


def rescale(name: str, blocks: Bytes, factor: float) -> Bytes | None:
    """The blocks with all weights times ``factor``: much faster than drawing a second bank.

    Returns:
        a copy, or ``None`` for a type without 16-bit scales at fixed places.
    """
    if name not in _SCALES:
        return None
    made = blocks.copy()
    for at in _SCALES[name]:
        scale = np.ascontiguousarray(made[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)
        made[:, at : at + 2] = _half(scale * np.float32(factor))
    return made


@functools.cache
def _spread(name: str) -> float:
    """Standard deviation of a type's weights when codes are random and the block's scale is 1."""
    if name in ("Q1_0", "Q2_0"):
        return 1.0
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    size = block_of(name)[1]
    blocks = (
        np.random.PCG64(1).random_raw(-(-4096 * size // 8)).view(np.uint8)[: 4096 * size].reshape(4096, size).copy()
    )
    one = np.array([1.0], np.float16).view(np.uint16)[0]
    if name == "IQ1_M":
        for index in range(4):
            byte = 48 + 2 * index + 1
            blocks[:, byte] = (blocks[:, byte] & 15) | (int(one) >> (4 * index) & 15) << 4
    else:
        blocks[:, :2] = np.array([one], np.uint16).view(np.uint8)
    return float(np.round(dequantize(blocks, GGMLQuantizationType[name]).astype(np.float64).std(), 3))
