"""Multiply the stored Q6_K rows on a real backend and compare its bits with the model's: `python numerics_gpu.py LIB_DIR`.

Prints JSON: for every number of columns the bits of each row, the model's, and how many are equal. On a GPU (needs a
CUDA build and its card) 1 to 8 columns go through `mul_mat_vec_q`, so every bit must match; with ``--switch 16``, in a
patched build, 1 to 16 do, all with the warps of one. With ``--device CPU`` the same graph runs on the CPU, whose sums
have another order: then it only shows that the script works.

The activations are the stored ones, in float. What the backend makes of them before it multiplies (int8 in blocks of 32
with a half-precision scale) is read off with a second matrix, of rows that are 1 in one place: each product with it is
``q * d``, exactly, and 127 is the largest q of a block. The model gets those q and d, so how the backend divides does
not matter.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from hiraishin.numerics import bits, mul_mat_vec_q6_k, nwarps_for, real_row, real_rows

F32, Q8_0, Q6_K = 0, 8, 14  # enum ggml_type
QK = 32


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
        (base, "ggml_backend_get_device", p, [p]),
        (base, "ggml_backend_dev_description", ctypes.c_char_p, [p]),
        (ggml, "ggml_backend_init_by_name", p, [ctypes.c_char_p, ctypes.c_char_p]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return base, ggml


def multiply(
    base: Any, backend: int, kind: int, weights: bytes, rows: int, columns: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Rows x columns on the backend: float32 [columns, rows]."""
    n, k = columns.shape
    context = base.ggml_init(InitParams(1 << 20, None, True))
    w = base.ggml_new_tensor_2d(context, kind, k, rows)
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


def one_hot_rows(k: int) -> bytes:
    """The identity matrix [k, k] in Q8_0: every block has the scale 1 and at most one quant, a 1."""
    blocks = np.zeros((k, k // QK, 2 + QK), np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    at = np.arange(k)
    blocks[at, at // QK, 2 + at % QK] = 1
    return blocks.tobytes()


def column_as_quantized(base: Any, backend: int, column: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """What the backend multiplies with instead of ``column``: int8 quants [k] and float16 scales [k/32]."""
    k = column.size
    products = multiply(base, backend, Q8_0, one_hot_rows(k), k, column[None])[0].astype(np.float64).reshape(-1, QK)
    scales = np.abs(products).max(axis=1) / 127
    quants = np.divide(products, scales[:, None], out=np.zeros_like(products), where=scales[:, None] > 0)
    rounded = np.rint(quants)
    if not np.array_equal(scales, scales.astype(np.float16)) or not np.array_equal(quants, rounded):
        raise SystemExit("the products with one-hot rows are no quants times half-precision scales")
    return rounded.astype(np.int8).reshape(-1), scales.astype(np.float16)


def compare(lib_dir: Path, device: str, switch: int = 0) -> dict[str, Any]:
    """Every number of columns: the backend's bits against the fused and the unfused model's.

    With the switch on, every number of columns up to it, and always the warps of one column.
    """
    os.environ["GGML_BATCH_INVARIANT"] = str(switch)
    base, ggml = libraries(lib_dir)
    if switch and not hasattr(base, "ggml_batch_invariant_get"):
        raise SystemExit(f"{lib_dir} has no switch: it is not a patched build")
    backend = ggml.ggml_backend_init_by_name(device.encode(), None)
    if not backend:
        raise SystemExit(f"there is no device {device} in {lib_dir}")
    stored = [real_row(i) for i in range(real_rows())]
    weights = b"".join(r.packed for r in stored)
    column = stored[0].activations
    quants, scales = column_as_quantized(base, backend, column)

    def model(row: bytes, columns: int, fused: bool) -> np.float32:
        return mul_mat_vec_q6_k(row, quants, scales, nwarps_for(1 if switch else columns), fused=fused).value

    report: dict[str, Any] = {
        "device": device,
        "description": base.ggml_backend_dev_description(base.ggml_backend_get_device(backend)).decode(),
        "switch": switch,
        "library_sha256": {
            p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(lib_dir.glob("libggml*.so"))
        },
        "rows": [base64.b64encode(r.packed).decode() for r in stored],
        "column": {
            "quants": base64.b64encode(quants.tobytes()).decode(),
            "scales": base64.b64encode(scales.tobytes()).decode(),
            "quants_as_in_numpy": int((quants == stored[0].quants).sum()),
            "scales_as_in_numpy": int((scales == stored[0].scales8).sum()),
        },
        "columns": {},
    }
    for n in range(1, (switch or 8) + 1):
        real = multiply(base, backend, Q6_K, weights, len(stored), np.stack([column] * n))
        models = {
            name: [bits(model(r.packed, n, fused)) for r in stored]
            for name, fused in (("fused", True), ("unfused", False))
        }
        found = bits(real[0])
        report["columns"][str(n)] = {
            "bits": found,
            "columns_equal": all(bits(row) == found for row in real),
            **{
                f"{name}_equal": sum(a == b for a, b in zip(found, bits_, strict=True))
                for name, bits_ in models.items()
            },
            "of": len(found),
            "largest_difference": float(
                max(abs(float(a) - float(model(r.packed, 1, True))) for a, r in zip(real[0], stored, strict=True))
            ),
        }
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lib_dir", type=Path)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--switch", type=int, default=0, choices=[0, *range(2, 17)])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(compare(options.lib_dir.resolve(), options.device, options.switch), indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
