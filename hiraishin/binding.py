"""The native library as Python sees it: loading it, checking its layout, and the switch of patched builds."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from hiraishin.errors import UserError

SWITCH_OFF, SWITCH_MAX, SWITCH_SERIAL = 0, 16, -1
"""Values of the switch of patched builds: off, passes of 2 to 16 tokens treated, one token at a time."""


@functools.cache
def load_native() -> Any:
    """Import ``llama_cpp`` bound to ``LLAMA_CPP_LIB_PATH``.

    Raises:
        UserError: the library or one of its dependencies is missing, or lacks a function.
    """
    try:
        from llama_cpp import llama_cpp as native
    except (OSError, FileNotFoundError, RuntimeError) as error:
        raise UserError(
            f"the llama.cpp library cannot be loaded: {error}", "Run build.sh again, or check --lib."
        ) from error
    except AttributeError as error:
        raise UserError(
            f"the llama.cpp library lacks a function: {error}",
            "It is of another version than the Python side (llama-cpp-python 0.3.36); build one with build.sh.",
        ) from error
    native.llama_backend_init()
    return native


def check_abi(abi: dict[str, Any]) -> None:
    """Compare a build's own struct layout (``abi.json``) with the ctypes declarations.

    ``abi["structs"]`` maps a struct name to ``{"size": int, "fields": {name: offset}}``.

    A build made elsewhere has no such file: then the known default values must sit where we would read them.

    Raises:
        UserError: a struct differs in size or in the offset of a field, or a default value is not what it must be.
    """
    native = load_native()
    structs = abi.get("structs") or {}
    if not structs:
        check_defaults(native)
        return
    for name, layout in structs.items():
        declared = _declared(native, name)
        if declared is None:
            continue
        if ctypes.sizeof(declared) != layout["size"]:
            raise UserError(
                f"{name} has {layout['size']} bytes in this build and {ctypes.sizeof(declared)} in the Python side",
                "The library is of another version; build one with build.sh.",
            )
        for field, offset in layout["fields"].items():
            descriptor = getattr(declared, field, None)
            if descriptor is not None and descriptor.offset != offset:
                raise UserError(
                    f"{name}.{field} sits at byte {offset} in this build and at {descriptor.offset} in the Python side",
                    "The library is of another version; build one with build.sh.",
                )


_DEFAULTS = {
    "llama_context_default_params": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "flash_attn_type": -1,
        "yarn_ext_factor": -1.0,
        "defrag_thold": -1.0,
        "type_k": 1,
        "type_v": 1,
        "embeddings": False,
        "offload_kqv": True,
        "op_offload": True,
        "swa_full": True,
        "kv_unified": False,
        "n_samplers": 0,
    },
    "llama_model_default_params": {"vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "main_gpu": 0},
}
"""Default values in ``llama-context.cpp`` and ``llama-model.cpp`` of the pinned source."""


def check_defaults(native: Any) -> None:
    """Trust a library without a layout description only if its default parameters read as the known ones.

    A struct with a field added or removed shifts what follows, so that some default reads as something else.

    Raises:
        UserError: a default value is not where it should be.
    """
    for function, values in _DEFAULTS.items():
        found = getattr(native, function)()
        for field, value in values.items():  # type: ignore[attr-defined]
            if getattr(found, field) != value:
                raise UserError(
                    f"this library's {function} gives {field} = {getattr(found, field)} where {value} is expected",
                    "Its layout is not that of llama-cpp-python 0.3.36, so it cannot be driven safely; build that source.",
                )


def _declared(native: Any, name: str) -> Any:
    if name == "ggml_tensor":
        return GGMLTensor
    return getattr(native, name, None)


class GGMLTensor(ctypes.Structure):
    """``struct ggml_tensor`` of ggml 0.25 (``ggml.h``); checked against each build's abi.json."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


@functools.cache
def _ggml_base() -> ctypes.CDLL | None:
    """libggml-base as already mapped into the process, for the switch's exported functions."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and Path(fields[5]).name.startswith("libggml-base"):
            return ctypes.CDLL(fields[5])
    return None


def set_switch(value: int, parts_off: int = 0) -> int:
    """Set the batch-invariance switch and give the value in force (0 on a build without one, if 0 was asked).

    ``parts_off`` is a bit mask of causes to leave untreated (see ``patches/README.md``).

    Raises:
        UserError: the build has no switch and one was asked for, or it refused the value.
    """
    load_native()
    base = _ggml_base()
    if base is None or not hasattr(base, "ggml_batch_invariant_set"):
        if value == SWITCH_OFF:
            return SWITCH_OFF
        raise UserError("this build has no batch-invariance switch", "Use the patched build: ./build.sh patched")
    base.ggml_batch_invariant_parts_set.argtypes = [ctypes.c_uint]
    base.ggml_batch_invariant_parts_set(ctypes.c_uint(0xFFFFFFFF & ~parts_off))
    in_force = int(base.ggml_batch_invariant_set(value))
    if in_force != value:
        raise UserError(f"the switch refused the value {value}; {in_force} is in force", "0, 2 to 16, or -1 (serial).")
    return in_force


def fallbacks() -> int | None:
    """How many operations ran token by token for want of an invariant kernel; ``None`` without a switch."""
    base = _ggml_base()
    if base is None or not hasattr(base, "ggml_batch_invariant_fallbacks"):
        return None
    base.ggml_batch_invariant_fallbacks.restype = ctypes.c_int64
    return int(base.ggml_batch_invariant_fallbacks())
