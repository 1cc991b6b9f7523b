"""Planted faults: what the witness tests and the hard-use tests plant, so that every checker is seen to check."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from hiraishin.binding import _ggml_base, load_native


def native_abort(text: str = "planted assertion") -> Iterator[dict[str, Any]]:
    """Child: fail a native assertion the way ggml does (``ggml_abort``: message on stderr, then SIGABRT)."""
    load_native()
    base = _ggml_base()
    assert base is not None
    base.ggml_abort(b"planted.cpp", ctypes.c_int(1), b"%s", text.encode())
    yield {"return": None}


def raise_signal(name: str) -> Iterator[dict[str, Any]]:
    """Child: die of a signal."""
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(10)
    yield {"return": None}


def raise_error(text: str) -> Iterator[dict[str, Any]]:
    """Child: fail like a bug in our own code."""
    if text:
        raise RuntimeError(text)
    yield {"return": None}


def sleep(seconds: float) -> Iterator[dict[str, Any]]:
    """Child: be busy."""
    time.sleep(seconds)
    yield {"return": None}
