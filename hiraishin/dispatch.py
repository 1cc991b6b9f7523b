"""Which kernel llama.cpp takes for an operation, as far as type, width, threads and buffer decide it."""

from __future__ import annotations

from typing import Any


def kernel_switch(
    op: str, weight_type: str, buffer: str, shape: tuple[int, ...], width: int, settings: dict[str, Any]
) -> str:
    """The name of the switch that may send a pass of this width down another path than a lone token's.

    Source: ``ggml-cpu/ggml-cpu.c`` (mul_mat), ``ggml-cpu/repack.cpp``, ``ggml-cpu/tiled``, ``llamafile/sgemm.cpp``
    and ``ggml-cpu/ops.cpp`` of the pinned llama.cpp.
    """
    if op in ("MUL_MAT", "MUL_MAT_ID"):
        if "REPACK" in buffer:
            return "repack: gemm from 4 columns, gemv below"
        kind = weight_type.lower()
        if kind in ("f32", "f16", "bf16"):
            return "sgemm: from 2 columns"
        if kind.endswith("_k"):
            return "tiled: from 8 columns"
        return ""
    if op == "FLASH_ATTN_EXT":
        return "split KV: one query, from 512 cells, over the threads" if settings.get("threads", 1) > 1 else ""
    return ""
