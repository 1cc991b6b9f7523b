"""Multiply the stored Q6_K rows on a real backend and compare its bits with the model's: `python numerics_gpu.py LIB_DIR`.

Prints JSON: for every number of columns the bits of each row, the model's, and how many are equal. On a GPU (needs a
CUDA build and its card) 1 to 8 columns go through `mul_mat_vec_q`, so every bit must match. With ``--device CPU`` the
same graph runs on the CPU, whose sums have another order: then it only shows that the script works.

The activations are handed over dequantized, q * d. Their largest of 32 is 127 * d, so quantizing them again gives the
same q and d however the backend divides.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

from hiraishin.numerics import bits, mul_mat_vec_q6_k, nwarps_for, real_row, real_rows

F32, Q6_K = 0, 14  # enum ggml_type


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def libraries(lib_dir: Path) -> tuple[Any, Any]:
    """libggml-base and libggml with the few functions declared that are used here."""
    base = ctypes.CDLL(str(lib_dir / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(lib_dir / "libggml.so"), mode=ctypes.RTLD_GLOBAL)
    p, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    for lib, name, result, arguments in (
        (base, "ggml_init", p, [InitParams]),
        (base, "ggml_free", None, [p]),
        (base, "ggml_new_tensor_2d", p, [p, ctypes.c_int, i64, i64]),
        (base, "ggml_mul_mat", p, [p, p, p]),
        (base, "ggml_new_graph", p, [p]),
        (base, "ggml_build_forward_expand", None, [p, p]),
        (base, "ggml_backend_alloc_ctx_tensors", p, [p, p]),
        (base, "ggml_backend_buffer_free", None, [p]),
        (base, "ggml_backend_tensor_set", None, [p, p, size, size]),
        (base, "ggml_backend_tensor_get", None, [p, p, size, size]),
        (base, "ggml_backend_graph_compute", ctypes.c_int, [p, p]),
        (ggml, "ggml_backend_init_by_name", p, [ctypes.c_char_p, ctypes.c_char_p]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return base, ggml


def multiply(base: Any, backend: int, weights: bytes, rows: int, columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows x columns on the backend: float32 [columns, rows]."""
    n, k = columns.shape
    context = base.ggml_init(InitParams(1 << 20, None, True))
    w = base.ggml_new_tensor_2d(context, Q6_K, k, rows)
    x = base.ggml_new_tensor_2d(context, F32, k, n)
    y = base.ggml_mul_mat(context, w, x)
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, y)
    buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
    if not buffer:
        raise SystemExit("the backend has no memory for the tensors")
    columns = np.ascontiguousarray(columns, np.float32)
    base.ggml_backend_tensor_set(w, weights, 0, len(weights))
    base.ggml_backend_tensor_set(x, columns.ctypes.data, 0, columns.nbytes)
    status = base.ggml_backend_graph_compute(backend, graph)
    if status:
        raise SystemExit(f"ggml_backend_graph_compute: {status}")
    out = np.empty((n, rows), np.float32)
    base.ggml_backend_tensor_get(y, out.ctypes.data, 0, out.nbytes)
    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(context)
    return out


def compare(lib_dir: Path, device: str) -> dict[str, Any]:
    """Every number of columns from 1 to 8: the backend's bits against the fused and the unfused model's."""
    base, ggml = libraries(lib_dir)
    backend = ggml.ggml_backend_init_by_name(device.encode(), None)
    if not backend:
        raise SystemExit(f"there is no device {device} in {lib_dir}")
    stored = [real_row(i) for i in range(real_rows())]
    weights = b"".join(r.packed for r in stored)
    column = stored[0].quants.astype(np.float32) * np.repeat(stored[0].scales8.astype(np.float32), 32)
    report: dict[str, Any] = {"device": device, "columns": {}}
    for n in range(1, 9):
        real = multiply(base, backend, weights, len(stored), np.stack([column] * n))
        same = all(bits(row) == bits(real[0]) for row in real)
        models = {
            name: [
                bits(mul_mat_vec_q6_k(r.packed, stored[0].quants, stored[0].scales8, nwarps_for(n), fused=fused).value)
                for r in stored
            ]
            for name, fused in (("fused", True), ("unfused", False))
        }
        found = bits(real[0])
        report["columns"][str(n)] = {
            "bits": found,
            "columns_equal": same,
            **{
                f"{name}_equal": sum(a == b for a, b in zip(found, model, strict=True))
                for name, model in models.items()
            },
            "of": len(found),
            "largest_difference": float(
                max(
                    abs(float(a) - float(mul_mat_vec_q6_k(r.packed, stored[0].quants, stored[0].scales8, 4).value))
                    for a, r in zip(real[0], stored, strict=True)
                )
            ),
        }
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lib_dir", type=Path)
    parser.add_argument("--device", default="CUDA0")
    options = parser.parse_args()
    print(json.dumps(compare(options.lib_dir, options.device), indent=1))
