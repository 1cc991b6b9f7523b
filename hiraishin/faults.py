"""Planted faults: what the witness tests and the hard-use tests plant, so that every checker is seen to check."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from hiraishin.binding import _ggml_base, load_native
from hiraishin.errors import UserError
from hiraishin.evaluate import Bench, evaluate_prompt
from hiraishin.llama import Session, get_model, set_switch


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


def wrong_accept(
    *, model_path: str, settings: dict[str, Any], switch: int, tokens: list[int], matrix: dict[str, Any], at: int
) -> Iterator[dict[str, Any]]:
    """Child: evaluate a prompt with a loop that keeps one guess it should not, the first wrong one after ``at`` checks.

    Drafters of kind ``model`` are not possible here. Every run of the matrix keeps its own wrong guess.
    """
    checks = 0
    planted = False

    def survives(guess: int, pick: int) -> bool:
        nonlocal checks, planted
        checks += 1
        if guess != pick and not planted and checks > at:
            planted = True
            return True
        return guess == pick

    def no_draft(quant: str) -> Session:
        raise UserError(f"no draft model ({quant}) in this test")

    with Session(
        get_model(model_path),
        n_ctx=len(tokens) + matrix["tokens"],
        threads=settings["threads"],
        flash_attn=settings["flash_attn"],
        kv_type=settings["kv_type"],
    ) as session:

        def turn(on: bool) -> None:
            set_switch(switch if on else 0)

        bench = Bench(session, turn, no_draft)
        for event in evaluate_prompt(bench, tokens, matrix, survives=survives):
            checks, planted = 0, False
            yield event
        set_switch(0)
