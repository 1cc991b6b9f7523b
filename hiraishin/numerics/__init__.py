"""The arithmetic behind the explanations: float order, warp partition, KV chunks, occupancy.

Everything here is a pure function of numbers. Each one follows a named piece of llama.cpp (upstream commit 0c1e57098,
the source that `build.sh` pins) closely enough that the *bits* of the result are the claim, not just the idea.
"""

from .attention import cpu_attention, cpu_chunks, gpu_attention, made_up_cache
from .floats import bits, fma32, spacing, sum_in_order
from .matvec import MatVec, mul_mat_vec_q6_k, nwarps_for, quantize_q8_1, warp_blocks
from .occupancy import Gpu, VectorAttention, padded
from .rows import RealRow, real_row, real_rows, row_results

__all__ = [
    "Gpu",
    "MatVec",
    "RealRow",
    "VectorAttention",
    "bits",
    "cpu_attention",
    "cpu_chunks",
    "fma32",
    "gpu_attention",
    "made_up_cache",
    "mul_mat_vec_q6_k",
    "nwarps_for",
    "padded",
    "quantize_q8_1",
    "real_row",
    "real_rows",
    "row_results",
    "spacing",
    "sum_in_order",
    "warp_blocks",
]
