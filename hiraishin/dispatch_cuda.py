"""What CUDA sends a pass of every width through, and so which widths give the same bits: worked out before anything runs.

Read from the pinned source (``ggml-cuda/ggml-cuda.cu``, ``mmvq.cu``, ``mmvf.cu``, ``mmf.cu``, ``mmq.cu``, ``fattn.cu``,
``fattn-common.cuh``, ``fattn-mma-f16.cuh``) for NVIDIA cards of compute capability 8.0 and later. Each token of a trace gets
a path: the kernel that computes its column of each kind of multiplication, and how its KV range is cut, as far as the
token sees it. Two widths with equal paths at every position are predicted to give the same bits.

Registers of the vector attention come from the compiled code (``data/compiled/registers.json``). Of the tensor core kernels
only the occupancy that the source asks the compiler for is known; it decides something only in long contexts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiraishin import paths
from hiraishin.dispatch import FLOATS, PADDING
from hiraishin.errors import UserError
from hiraishin.numerics.occupancy import CHUNK, Gpu, blocks_per_sm, chunk_owners, parallel_blocks

ADA, BLACKWELL = 890, 1200
MMVQ_MAX, MMF_MAX = 8, 16
"""Columns of the widest quantized mat-vec; columns of the widest float tensor core product."""

_LIMITS = {800: Gpu(0, warps=64, blocks=32), 860: Gpu(0, warps=48, blocks=16), 900: Gpu(0, warps=64, blocks=32)}
_MMVQ = {
    ADA: {"q2_k": 4, "q3_k": 6},
    BLACKWELL: {"q2_k": 5, "q3_k": 5, "q4_k": 5, "q5_k": 6, "q6_k": 7},
    1210: {"q2_k": 6},
    870: dict.fromkeys(("q2_k", "q3_k", "q4_k", "q5_k", "q6_k"), 1),
}
"""``ggml_cuda_should_use_mmvq``: types that leave the mat-vec before 8 columns, by compute capability."""

_MMVQ_EXPERTS = {"iq2_s": 7, "iq3_s": 6, "iq3_xxs": 7, "mxfp4": 7, "q2_k": 7, "q3_k": 5}
"""``get_mmvq_mmid_max_batch_turing_plus``: the same for experts before Ada."""


@dataclass(frozen=True)
class Card:
    """A GPU as the dispatch sees it. ``cc`` and ``dispatch_cc`` like 900; ``fit``: blocks an SM of the vector kernels
    for one and for several queries, where they are pinned (``GGML_CUDA_TEST_BLOCKS_PER_SM``)."""

    cc: int
    sms: int
    dispatch_cc: int = 0
    fit: tuple[int, int] | None = None

    @property
    def chosen_by(self) -> int:
        """The compute capability by which kernels are selected (``GGML_CUDA_TEST_DISPATCH_CC`` may pretend another)."""
        return self.dispatch_cc or self.cc

    def vector_blocks(self, head: int, queries: int, kv_type: str) -> int:
        """Blocks of the vector attention kernel that fit on an SM, from its registers.

        Raises:
            UserError: that kernel has not been compiled for this card and read.
        """
        if self.fit:
            return self.fit[queries > 1]
        limits = _LIMITS.get(self.cc, Gpu(0))
        return blocks_per_sm(_registers(self.cc // 10, head, 1 if queries == 1 else 2, kv_type), limits)


@functools.cache
def _registers(arch: int, head: int, queries: int, kv_type: str) -> int:
    text = (paths.ROOT / "data" / "compiled" / "registers.json").read_text(encoding="utf-8")
    wanted = {
        "arch": arch,
        "kernel": "flash_attn_ext_vec",
        "head": head,
        "queries": queries,
        "type": kv_type.upper(),
    }
    for kernel in json.loads(text)["kernels"]:
        if wanted.items() <= kernel.items():
            return int(kernel["registers"])
    raise UserError(
        f"nothing is known of the vector attention kernel for sm_{arch}, head size {head}, {kv_type} cache",
        "data/compiled/extract_registers.py reads it from the compiled code.",
    )


@dataclass(frozen=True)
class Shape:
    """What of a model the dispatch looks at. ``kinds``: (type in lower case, is it an expert's, does mmf take it)."""

    heads: int
    kv_heads: int
    head: int
    kinds: frozenset[tuple[str, bool, bool]]

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Parts:
    """Parts of the patches that are in force (none on stock), by their names.

    ``fused_experts``: experts with float weights are run in a lone token's fused form whatever their type (``0111``); before
    that patch only F16 ones were.
    """

    on: frozenset[str] = field(default_factory=frozenset)
    fused_experts: bool = True

    def treats_attention(self, width: int) -> bool:
        """Whether attention for so many queries goes where a lone one goes."""
        return ("cuda-attention-8" if width <= 8 else "cuda-attention-16") in self.on

    def treats_product(self, kind: str, expert: bool) -> bool:
        """Whether products with such weights do."""
        follows = self.fused_experts or not expert or kind not in FLOATS or kind == "f16"
        return "cuda-mul-mat" in self.on and follows


def column_path(kind: str, expert: bool, mmf: bool, width: int, card: Card) -> Hashable:
    """The kernel that computes one column of a product with weights of this type among ``width`` columns."""
    cc = card.chosen_by
    if kind in FLOATS:
        # A lone token's gate and up of experts are fused into a mat-vec; apart, mmf takes experts at every width.
        if width == 1 or (not expert and kind == "f32" and width <= 3):
            return "mmvf"
        return "mmf" if mmf and width <= MMF_MAX else ("cublas", width)
    if expert:
        limit = MMVQ_MAX if cc >= ADA else _MMVQ_EXPERTS.get(kind, MMVQ_MAX)
        return "mmvq, 4 warps" if width == 1 else "mmvq, a warp a token" if width <= limit else "mmq"
    if width <= min(MMVQ_MAX, _MMVQ.get(cc, {}).get(kind, MMVQ_MAX)):
        return "mmvq, 4 warps" if width <= 4 else "mmvq, 2 warps"
    return "mmq"


def uses_vector_kernel(shape: Shape, kv_type: str, cells: int, queries: int, card: Card) -> bool:
    """``ggml_cuda_get_best_fattn_kernel`` for cards with tensor cores: the vector kernel, or the tensor core kernel."""
    if shape.head > 256 or shape.head % 64:
        return False
    if kv_type == "f16":
        if card.chosen_by >= ADA and queries == 1 and not (shape.group > 4 and (shape.head >= 256 or cells >= 8192)):
            return True
    elif queries <= (2 if card.chosen_by >= ADA else 1):
        return True
    return shape.group == 1 and queries == 1


@functools.cache
def tensor_core_cuts(
    shape: Shape, cells: int, queries: int, query: int, card: Card
) -> tuple[Hashable, list[tuple[int, int]]]:
    """The variant of the tensor core kernel that one query is computed by, and where its KV range is cut.

    Returns:
        what decides the order of sums inside a block (warps side by side, cells a step, columns a warp), and (output
        tile, first cell) of every part of the range.
    """
    heads_at_once = 8 if shape.group > 4 else 4 if shape.group > 2 else 2 if shape.group > 1 else 1
    columns = next((c for c in (8, 16, 32) if queries * heads_at_once <= c), 64)
    if shape.head == 256:
        threads, occupancy, step = {8: (128, 2, 64), 16: (256, 1, 64)}.get(columns, (128, 2, 32))
    else:
        threads, occupancy, step = 128, 2, 128 if columns == 8 else 64
    per_warp = 8 if columns == 8 or (shape.head, columns) == (256, 16) else 16
    side_by_side = threads // 32 * per_warp // columns
    tiles_x = -(-queries // (columns // heads_at_once))
    tiles = tiles_x * -(-shape.group // heads_at_once) * shape.kv_heads
    steps = -(-cells // step)
    blocks = _stream_k_blocks(tiles, steps, occupancy * card.sms, card.cc)
    work = tiles * steps
    starts = sorted({block * work // blocks for block in range(blocks)} | {tile * steps for tile in range(tiles)})
    mine = [tile for tile in range(tiles) if tile % tiles_x == query // (columns // heads_at_once)]
    cuts = sorted({(index, (s - tile * steps) * step) for index, tile in enumerate(mine) for s in starts
                   if tile * steps <= s < (tile + 1) * steps})  # fmt: skip
    return (side_by_side, step, per_warp), cuts


_parallel_blocks = functools.cache(parallel_blocks)


def _stream_k_blocks(tiles: int, steps: int, most: int, cc: int) -> int:
    waves = -(-tiles // most)
    if cc < ADA and 100 * tiles // (most * waves) >= 75:
        return tiles
    raw = min(most, steps * tiles)
    rounded = raw // tiles * tiles
    loss = 100 * (raw - rounded) // raw if rounded else 100
    return rounded if loss <= 5 else raw


def attention_path(
    shape: Shape, settings: dict[str, Any], position: int, cells: int, width: int, query: int, card: Card, parts: Parts
) -> Hashable:
    """How the query at ``position`` is computed in a pass of ``width`` whose padded range holds ``cells``.

    Only what the query sees counts: parts that hold masked cells alone add exact zeros.
    """
    if not settings["flash_attn"]:
        return "alone" if width == 1 else ("two products", width)
    kv_type = settings["kv_type"]
    alone = uses_vector_kernel(shape, kv_type, cells, 1, card)
    treated = width > 1 and parts.treats_attention(width)
    if treated and not alone:
        width, query = 1, 0  # token by token
    if alone if treated else uses_vector_kernel(shape, kv_type, cells, width, card):
        as_one = width == 1 or "cuda-parallel-blocks" in parts.on
        queries = 1 if as_one else width
        tiles = -(-queries // (1 if queries == 1 else 2)) * shape.heads
        fit = card.vector_blocks(shape.head, queries, kv_type)
        blocks = _parallel_blocks(fit, card.sms, tiles, cells, chunk=shape.head)
        seen = chunk_owners(position + 1, blocks, CHUNK)
        return ("vector", tuple(seen.index(owner) for owner in seen))
    variant, cuts = tensor_core_cuts(shape, cells, width, query, card)
    return ("tensor cores", variant, tuple(cut for cut in cuts if cut[1] <= position))


def pieces(start: int, count: int, guard: bool) -> Iterable[tuple[int, int]]:
    """(first position, tokens) of the passes that a pass becomes: the guard cuts where the padded range grows."""
    if not guard or count == 1:
        yield start, count
        return
    first = start
    for position in range(start + 1, start + count + 1):
        if position == start + count or -(-(position + 1) // PADDING) != -(-(first + 1) // PADDING):
            yield first, position - first
            first = position


def predict_widths(
    shape: Shape,
    card: Card,
    settings: dict[str, Any],
    prompt_tokens: int,
    tokens: int,
    widths: Sequence[int],
    parts: Parts = Parts(),
) -> dict[str, Any]:
    """Width classes and first differing positions of a CUDA build, as :func:`hiraishin.dispatch.predict_widths`.

    Args:
        shape: of the model.
        card: the GPU.
        settings: of the context (``flash_attn``, ``kv_type``).
        prompt_tokens: cells before the trace.
        tokens: positions of the trace.
        widths: to predict; 1 is always added.
        parts: which parts of the patches are on.
    """

    def rows(width: int) -> tuple[Hashable, ...]:
        out: list[Hashable] = []
        for start in range(0, tokens, width):
            count = min(width, tokens - start)
            for first, held in pieces(prompt_tokens + start, count, "guard" in parts.on):
                cells = -(-(first + held) // PADDING) * PADDING
                products = tuple(
                    column_path(kind, expert, mmf, 1 if parts.treats_product(kind, expert) else held, card)
                    for kind, expert, mmf in sorted(shape.kinds)
                )
                out.extend(
                    (products, attention_path(shape, settings, first + i, cells, held, i, card, parts))
                    for i in range(held)
                )
        return tuple(out)

    alone = rows(1)
    classes: dict[tuple[Hashable, ...], list[int]] = {}
    firsts: dict[int, int | None] = {}
    for width in sorted({1, *widths}):
        mine = rows(width)
        classes.setdefault(mine, []).append(width)
        firsts[width] = next((prompt_tokens + i for i in range(tokens) if mine[i] != alone[i]), None)
    wrong = [w for w, kv in firsts.items() if kv is not None]
    return {
        "classes": sorted(classes.values()),
        "first_differing_width": min(wrong, default=None),
        "first_differing_kv": firsts[min(wrong)] if wrong else None,
        "first_differing_kv_by_width": {str(w): kv for w, kv in firsts.items()},
        "why": _why(shape, card, settings, prompt_tokens + tokens, sorted({1, *widths})),
    }


def _why(shape: Shape, card: Card, settings: dict[str, Any], cells: int, widths: Sequence[int]) -> list[str]:
    lines = []
    for kind, expert, mmf in sorted(shape.kinds):
        runs: list[tuple[str, int]] = []
        for width in widths:
            path = column_path(kind, expert, mmf, width, card)
            name = path if isinstance(path, str) else "cuBLAS"
            if not runs or runs[-1][0] != name:
                runs.append((name, width))
        steps = ", ".join(name if width == widths[0] else f"{name} from {width}" for name, width in runs)
        lines.append(f"{kind}{' experts' if expert else ''}: {steps}")
    padded = -(-cells // PADDING) * PADDING
    if not settings["flash_attn"]:
        lines.append("attention by two products")
    elif uses_vector_kernel(shape, settings["kv_type"], padded, 1, card):
        last = max((w for w in widths if uses_vector_kernel(shape, settings["kv_type"], padded, w, card)), default=1)
        lines.append(f"attention: vector kernel to {last} {'query' if last == 1 else 'queries'}, tensor cores beyond")
    else:
        lines.append("attention: tensor cores at every width")
    return lines
