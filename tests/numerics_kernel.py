"""Run the real CPU attention kernel of a build on given numbers: `python numerics_kernel.py LIB_DIR IN.npz OUT.npy`.

A process of its own, because two builds in one process would silently share the first one's libggml.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

F32, F16 = 0, 1  # enum ggml_type


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def main(lib_dir: str, in_path: str, out_path: str) -> None:
    """Arrays in: q [queries, head] float32, k and v [cells, head] float16, mask [queries, cells] float16, threads."""
    base = ctypes.CDLL(str(Path(lib_dir) / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(Path(lib_dir) / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    p, i64, f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for lib, name, result, arguments in (
        (base, "ggml_init", p, [InitParams]),
        (base, "ggml_new_tensor_3d", p, [p, ctypes.c_int, i64, i64, i64]),
        (base, "ggml_get_data", p, [p]),
        (base, "ggml_flash_attn_ext", p, [p, p, p, p, p, f, f, f]),
        (base, "ggml_new_graph", p, [p]),
        (base, "ggml_build_forward_expand", None, [p, p]),
        (base, "ggml_nbytes", ctypes.c_size_t, [p]),
        (cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [p, p, ctypes.c_int]),
        (cpu, "ggml_cpu_init", None, []),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_cpu_init()
    arrays = np.load(in_path)
    q, k, v, mask = arrays["q"], arrays["k"], arrays["v"], arrays["mask"]
    head, queries, cells = q.shape[1], q.shape[0], k.shape[0]
    context = base.ggml_init(InitParams(64 << 20, None, False))

    def tensor(kind: int, array: np.ndarray, *shape: int) -> int:
        t = base.ggml_new_tensor_3d(context, kind, *shape)
        data = np.ascontiguousarray(array)
        assert base.ggml_nbytes(t) == data.nbytes
        ctypes.memmove(base.ggml_get_data(t), data.ctypes.data, data.nbytes)
        return int(t)

    out = base.ggml_flash_attn_ext(
        context,
        tensor(F32, q, head, queries, 1),
        tensor(F16, k, head, cells, 1),
        tensor(F16, v, head, cells, 1),
        tensor(F16, mask, cells, queries, 1),
        float(arrays["scale"]),
        0.0,
        0.0,
    )
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, out)
    status = cpu.ggml_graph_compute_with_ctx(context, graph, int(arrays["threads"]))
    if status:
        raise SystemExit(f"ggml_graph_compute_with_ctx: {status}")
    rows = np.empty((queries, head), np.float32)
    assert base.ggml_nbytes(out) == rows.nbytes
    ctypes.memmove(rows.ctypes.data, base.ggml_get_data(out), rows.nbytes)
    np.save(out_path, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
