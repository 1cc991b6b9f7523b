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

    Raises:
        UserError: a struct differs in size or in the offset of a field, or the description is empty.
    """
    native = load_native()
    structs = abi.get("structs") or {}
    if not structs:
        raise UserError("the build has no layout description (abi.json)", "Run build.sh again.")
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
