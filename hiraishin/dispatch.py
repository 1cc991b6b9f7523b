"""Which kernel llama.cpp takes for an operation, and what follows for passes of every width before any is run.

A small model of the dispatch, read from the pinned source: ``ggml-cpu/ggml-cpu.c`` (mul_mat), ``repack.cpp``,
``tiled/tiled.cpp``, ``llamafile/sgemm.cpp`` and ``ops.cpp`` (flash attention) for the CPU; ``ggml-cuda/mmvq.cu``,
``mmvf.cu``, ``ggml-cuda.cu`` and ``fattn.cu`` for CUDA. It knows what a lone token and a pass of a given width are
sent through, not what comes out: two paths with other orders of sums are taken to give other bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from hiraishin.gguf_header import Tensor, read_header

if TYPE_CHECKING:
    from hiraishin.models import ModelFile
    from hiraishin.worker import Worker

SGEMM_FROM, REPACK_GROUP, TILED_FROM, SPLIT_FROM, PADDING = 2, 4, 8, 512, 256
"""Columns from which sgemm and the tiled path take over; columns of one repacked gemm; cells from which a lone query's
KV range is split over the threads; what the KV range is rounded up to."""

FLOATS = frozenset({"f32", "f16", "bf16"})
TILED = frozenset("q2_k q3_k q4_k q5_k q6_k iq4_xs iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m".split())
REORDERED = frozenset({"q4_k"})
"""Types whose repacked gemm adds in another order than their gemv on AVX2. Q4_0 and IQ4_NL are repacked too, but both of
their kernels add block after block."""


def kernel_switch(
    op: str, weight_type: str, buffer: str, shape: tuple[int, ...], width: int, settings: dict[str, Any]
) -> str:
    """The name of the switch that may send a pass of this width down another path than a lone token's, or ``""``.

    Args:
        op: ggml's name of the operation.
        weight_type: type of its first source.
        buffer: name of the buffer that holds the first source (it tells backends and repacked weights apart).
        shape: of the output, ggml's order.
        width: tokens in the pass.
        settings: of the context (``threads``, ``kv_type``).
    """
    kind = weight_type.lower()
    if buffer.startswith("CUDA"):
        return _cuda_switch(op, kind, width)
    if op in ("MUL_MAT", "MUL_MAT_ID"):
        if "AMX" in buffer:
            return "AMX: tiles for many columns, AVX512-VNNI for one"
        if "REPACK" in buffer:
            return "repack: gemm from 4 columns, gemv below"
        if kind in FLOATS:
            return "sgemm: from 2 columns"
        return "tiled: from 8 columns" if kind in TILED else ""
    if op == "FLASH_ATTN_EXT":
        return "split KV: one query, from 512 cells, over the threads" if settings.get("threads", 1) > 1 else ""
    return ""


def _cuda_switch(op: str, kind: str, width: int) -> str:
    """CUDA with tensor cores, Ampere and later. Numbers are those of ``mmvq.cu`` and ``ggml-cuda.cu``."""
    if op == "FLASH_ATTN_EXT":
        return "attention: vector kernel for one query, tensor-core kernel for more"
    if op not in ("MUL_MAT", "MUL_MAT_ID"):
        return ""
    if kind in FLOATS:
        return "mmvf: mat-vec for few columns, mmf or cuBLAS for more"
    if width <= 4:
        return "mmvq: 4 warps to 4 columns"
    return "mmvq: 4 warps to 4 columns, 2 from 5" if width <= 8 else "mmq: from 9 columns; mmvq below"


def _column_path(kind: str, repacked: bool, width: int, column: int) -> str:
    """The kernel that computes one column of a multiplication with a weight of this type, in a pass of ``width``."""
    if kind in FLOATS:
        return "sgemm" if width >= SGEMM_FROM else "dot"
    if repacked:
        return "gemm" if column < width - width % REPACK_GROUP and kind in REORDERED else "gemv"
    if kind in TILED:
        return "tiled" if width >= TILED_FROM else "dot"
    return "dot"


def _attention_path(cells: int, width: int, settings: dict[str, Any]) -> Hashable:
    """How the KV range of one query is walked: whole, or in so many cells a chunk."""
    if not settings["flash_attn"]:
        return "sgemm" if width >= SGEMM_FROM else "dot"  # two multiplications with an f16 cache
    threads, padded = settings["threads"], -(-cells // PADDING) * PADDING
    split = width == 1 and padded >= SPLIT_FROM and threads > 1 and settings["kv_type"] in ("f16", "f32")
    return -(-padded // threads) if split else "whole"


def _weights(tensors: Sequence[Tensor], extra_bufts: bool, avx2: bool) -> set[tuple[str, bool]]:
    """(type, repacked?) of every weight that a layer or the output multiplies with."""
    found = set()
    tied = not any(t.name == "output.weight" for t in tensors)
    for tensor in tensors:
        if len(tensor.shape) < 2 or (tensor.name == "token_embd.weight" and not tied):
            continue
        kind = tensor.type.lower()
        can = kind in ("q4_k", "q4_0", "iq4_nl") and avx2 and tensor.shape[1] % 8 == 0 and len(tensor.shape) == 2
        found.add((kind, can and extra_bufts))
    return found


def predict_widths(
    tensors: Sequence[Tensor],
    settings: dict[str, Any],
    prompt_tokens: int,
    tokens: int,
    widths: Sequence[int],
    *,
    avx2: bool = True,
    tiled: bool = True,
) -> dict[str, Any]:
    """Width classes of a stock CPU build from tensor types and settings alone.

    Each position of the trace has a path: the kernel of every kind of multiplication for its column, and the way its KV
    range is walked. Two widths whose paths agree at every position give the same bits; a width that nowhere leaves the
    lone token's path is exact.

    Args:
        tensors: the model's tensor table.
        settings: of the context (``threads``, ``flash_attn``, ``kv_type``, ``extra_bufts``).
        prompt_tokens: cells before the trace.
        tokens: positions of the trace.
        widths: to predict; 1 is always added.
        avx2: the processor has AVX2 (weights can be repacked).
        tiled: the tiled path is on.

    Returns:
        ``classes``, ``first_differing_width``, ``first_differing_kv`` (of the first differing width; ``None`` where all
        are exact), ``first_differing_kv_by_width``, and ``why``, one line a switch.
    """
    weights = sorted(_weights(tensors, settings.get("extra_bufts", True), avx2))

    def path(position: int, width: int) -> tuple[Hashable, ...]:
        column = position % width
        held = min(width, tokens - (position - column))  # the last pass may hold fewer
        kernels = tuple(
            _column_path(kind, repacked, held, column) if tiled or kind not in TILED or repacked else "dot"
            for kind, repacked in weights
        )
        # Every token of a pass sees the range that is in use at its end.
        return (*kernels, _attention_path(prompt_tokens + position - column + held, held, settings))

    rows: dict[tuple[Hashable, ...], list[int]] = {}
    lone = tuple(path(i, 1) for i in range(tokens))
    firsts: dict[int, int | None] = {}
    for width in sorted({1, *widths}):
        mine = tuple(path(i, width) for i in range(tokens))
        rows.setdefault(mine, []).append(width)
        firsts[width] = next((prompt_tokens + i for i in range(tokens) if mine[i] != lone[i]), None)
    wrong = [w for w, kv in firsts.items() if kv is not None]
    return {
        "classes": sorted(rows.values()),
        "first_differing_width": min(wrong, default=None),
        "first_differing_kv": firsts[min(wrong)] if wrong else None,
        "first_differing_kv_by_width": {str(w): kv for w, kv in firsts.items()},
        "why": _why(weights, settings, prompt_tokens + tokens, tiled),
    }


def _why(weights: list[tuple[str, bool]], settings: dict[str, Any], cells: int, tiled: bool) -> list[str]:
    lines = []
    for kind, repacked in weights:
        if repacked and kind in REORDERED:
            lines.append(f"{kind} weights are repacked: columns in whole groups of {REPACK_GROUP} go through gemm")
        elif repacked:
            lines.append(f"{kind} weights are repacked, gemm and gemv add in the same order")
        elif kind in FLOATS:
            lines.append(f"{kind} weights: sgemm from {SGEMM_FROM} columns, dot products for one")
        elif kind in TILED and tiled:
            lines.append(f"{kind} weights: the tiled path from {TILED_FROM} columns, dot products below")
        else:
            lines.append(f"{kind} weights: dot products at every width")
    if not settings["flash_attn"]:
        lines.append(f"attention by two multiplications: sgemm from {SGEMM_FROM} columns")
    elif settings["threads"] > 1 and settings["kv_type"] in ("f16", "f32") and cells > SPLIT_FROM - PADDING:
        lines.append(f"a lone query's range is split over {settings['threads']} threads from {SPLIT_FROM} cells")
    else:
        lines.append("a query's range is walked whole at every width")
    return lines


def predict(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    prompt_tokens: int,
    tokens: int,
    widths: list[int],
    *,
    switch: int = 0,
) -> dict[str, Any]:
    """Width classes and the first differing position of a build and model, before anything runs.

    Returns:
        as :func:`predict_widths`; with the switch on one class of all widths that it treats. Where there is no model of
        the dispatch (another backend), ``classes`` is empty and ``why`` says so.
    """
    build = worker.build
    if switch:
        treated = sorted({1, *(w for w in widths if switch < 0 or w <= switch)})
        return {
            "classes": [treated, *([w] for w in sorted(widths) if w not in treated)],
            "first_differing_width": None,
            "first_differing_kv": None,
            "first_differing_kv_by_width": {str(w): None for w in treated},
            "why": [f"the switch at {switch} gives passes of every width the lone token's order of sums"],
        }
    if build.backend != "cpu":
        return {
            "classes": [],
            "first_differing_width": None,
            "first_differing_kv": None,
            "first_differing_kv_by_width": {},
            "why": [f"there is no model of the {build.backend} dispatch"],
        }
    features = set((build.description.get("cpu") or {}).get("features") or ["avx2"])
    return predict_widths(
        read_header(model.path).tensors, settings, prompt_tokens, tokens, widths, avx2="avx2" in features
    )


def score(prediction: dict[str, Any], classes: list[list[int]], firsts: dict[int, int | None]) -> dict[str, Any]:
    """A prediction against what was measured.

    A trace can be too short for two paths to part: int8 activations and a lucky rounding hide a difference. So classes
    are scored, and which widths are exact, and how many positions late the first difference shows, each by itself.

    Args:
        prediction: of :func:`predict`.
        classes: measured width classes.
        firsts: width -> KV position of the first row that differs (``None``: none).

    Returns:
        ``classes_right``, ``exact_widths_right``, ``first_width_right`` and, for each differing width, ``late_by``:
        measured minus predicted first KV position (``None`` where only one side has one).
    """
    predicted = {int(w): kv for w, kv in prediction["first_differing_kv_by_width"].items()}
    known = bool(prediction["classes"])
    wrong = sorted(w for w, kv in firsts.items() if kv is not None)
    late: dict[str, int | None] = {}
    for width, kv in sorted(firsts.items()):
        guess = predicted.get(width)
        if kv is not None or guess is not None:
            late[str(width)] = kv - guess if kv is not None and guess is not None else None
    return {
        "classes_right": known and prediction["classes"] == classes,
        "exact_widths_right": known and all((predicted.get(w) is None) == (kv is None) for w, kv in firsts.items()),
        "first_width_right": known and prediction["first_differing_width"] == min(wrong, default=None),
        "late_by": late,
    }
