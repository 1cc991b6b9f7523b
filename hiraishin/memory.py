"""How much memory a model and a context will take, and whether there is that much, before anything is loaded."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from hiraishin.errors import UserError
from hiraishin.gguf_header import Header, read_header
from hiraishin.gguf_tables import GGML_TYPES

_TYPE_BYTES = {name.lower(): size / weights for name, weights, size in GGML_TYPES.values()}
_FLOAT = 4
_WORKSPACE = 64 << 20
"""What a context needs besides: graph, buffers of activations for narrow models."""


def memory_needed(header: Header, n_ctx: int, kv_type: str = "f16", rows: int = 0, *, n_batch: int = 512) -> int:
    """Bytes that measuring with a model will take, about.

    The sum of: the weights (all parts of a split model); the KV cache, ``layers x cells x KV heads x (key + value
    length)`` in its type, cells being the context rounded up to 256 (a sliding window is counted as if it were
    full); a recurrent model's state; the logits and activations of a pass of ``n_batch`` tokens, which llama.cpp
    reserves up front; and ``rows`` whole logit rows kept for comparison.

    Args:
        header: the model's header.
        n_ctx: context in tokens.
        kv_type: ggml type of the cache, as in a profile.
        rows: reference rows that stay until a prompt is done; they are read again at every width, so they count even
            where they lie in a memory map.
        n_batch: tokens in the longest pass.

    Raises:
        UserError: no such KV type.
    """
    if kv_type.lower() not in _TYPE_BYTES:
        raise UserError(f"there is no KV type {kv_type!r}", "Known: f16, bf16, f32, q8_0, q4_0.")
    weights = sum((header if part == header.path else read_header(part)).weight_bytes for part in header.parts)
    cells = -(-n_ctx // 256) * 256
    a_cell = header.n_head_kv * (header.head_dim + header.head_dim_v) if header.n_head > 0 else 0
    cache = int(header.n_layer * cells * a_cell * _TYPE_BYTES[kv_type.lower()])
    state = header.n_layer * header.state_elements * _FLOAT
    widest = header.n_vocab + 4 * header.n_embd + 3 * header.n_ff
    return weights + cache + state + n_batch * widest * _FLOAT + rows * header.n_vocab * _FLOAT + _WORKSPACE


def memory_available() -> tuple[int, str]:
    """Bytes this process tree may still take, and what limits them.

    The least of: free memory; what a control group (v2 or v1) leaves; what the limit on address space leaves.
    """
    bounds = [(int(psutil.virtual_memory().available), "free memory")]
    bounds += [(left, "the control group's limit") for left in _control_groups()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        # A child starts with about as much address space as we have: the same libraries.
        bounds.append((max(0, soft - int(psutil.Process().memory_info().vms)), "the limit on address space"))
    return min(bounds)


def _control_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What every control group above this process leaves, in bytes; page cache that can be dropped counts as free."""
    left: list[int] = []
    try:
        lines = proc.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            folder, limit, used, drop = root / path.lstrip("/"), "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder, limit = root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
            used, drop = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            try:
                most = int((group / limit).read_text(encoding="ascii"))
                now = int((group / used).read_text(encoding="ascii"))
                stat = (group / "memory.stat").read_text(encoding="ascii").split()
                cache = int(stat[stat.index(drop) + 1]) if drop in stat else 0
            except (OSError, ValueError):
                continue  # "max", or a group without the files: no limit here
            if most < 1 << 60:
                left.append(max(0, most - now + cache))
    return left


def gpu_memory_available() -> tuple[int, str] | None:
    """Free bytes of the first GPU and its name; ``None`` without one that can be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: nvidia-ml-py has an error class for each
        return None
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetName(device)
        return int(pynvml.nvmlDeviceGetMemoryInfo(device).free), name if isinstance(name, str) else name.decode()
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def check_memory(
    model: Path | Header, n_ctx: int, kv_type: str = "f16", rows: int = 0, *, n_batch: int = 512, gpu: bool = False
) -> int:
    """Refuse a measurement that would not fit, before the model is loaded.

    Args:
        model: the GGUF file, or its header.
        n_ctx, kv_type, rows, n_batch: see :func:`memory_needed`.
        gpu: the model goes to the GPU; reference rows stay in the machine's memory.

    Returns:
        the bytes needed (on the GPU if ``gpu``).

    Raises:
        UserError: it does not fit; says how much is needed, how much there is, and what takes the most.
    """
    header = model if isinstance(model, Header) else read_header(model)
    advice = "A shorter context, fewer tokens or a smaller quant needs less."
    if gpu:
        needed = memory_needed(header, n_ctx, kv_type, 0, n_batch=n_batch)
        found = gpu_memory_available()
        if found is not None and needed > found[0]:
            raise UserError(
                f"{header.path.name} with {n_ctx:,} tokens of context needs {needed / 1e9:.1f} GB of GPU memory; "
                f"{found[0] / 1e9:.1f} GB are free on the {found[1]}",
                advice,
            )
        host = rows * header.n_vocab * _FLOAT
    else:
        needed = host = memory_needed(header, n_ctx, kv_type, rows, n_batch=n_batch)
    available, limit = memory_available()
    if host > available:
        kept = f", {rows * header.n_vocab * _FLOAT / 1e9:.1f} GB of it logits kept for comparison" if rows else ""
        raise UserError(
            f"{header.path.name} with {n_ctx:,} tokens of context needs {host / 1e9:.1f} GB of memory{kept}; "
            f"{available / 1e9:.1f} GB are available ({limit})",
            advice,
        )
    return needed
