"""Planted faults: what the witness tests and the hard-use tests plant, so that every checker is seen to check."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hiraishin.binding import _ggml_base, load_native
from hiraishin.errors import UserError
from hiraishin.evaluate import Bench, evaluate_prompt
from hiraishin.llama import Logits, Session, get_model, set_switch
from hiraishin.watch import Watch


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


LOGIC_FAULTS = ("position", "rollback", "mask", "state")
"""What a passes of several tokens can get wrong that is no rounding: the last token's position is one too low; a rejected
token is still in the cache; the tokens see those after them; the cache holds the end of another prompt."""

_OTHER_PROMPT = 8


class FaultySession(Session):
    """A session with one logic fault, in the first pass of 2 to 16 tokens that starts ``after`` tokens past the prompt.

    Lone tokens and every other pass are right: what the fault left behind is taken back before the next call.
    """

    fault = ""
    after = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "n_ctx": named["n_ctx"] + _OTHER_PROMPT})
        self._prompt: list[int] = []
        self._undo: Callable[[], None] | None = None

    def prefill(self, tokens: Sequence[int], *, last_alone: bool = False) -> Logits:
        """As ever; the prompt is kept."""
        self._prompt = list(tokens)
        return super().prefill(tokens, last_alone=last_alone)

    def rollback(self, n_past: int) -> None:
        """Take the fault back first."""
        self._take_back()
        super().rollback(n_past)

    def decode(self, tokens: Any, *, logits: str = "all") -> Logits:
        """A pass; faulty where the fault is planted."""
        self._take_back()
        start = len(self._prompt) + self.after
        wanted = logits == "all" and 2 <= len(tokens) <= 16 and start <= self.n_past < start + len(tokens)
        if not wanted or (self.fault == "state" and self.n_past != len(self._prompt)):
            return super().decode(tokens, logits=logits)
        return self._faulty(list(tokens))

    def _take_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            with _unwatched():
                undo()

    def _faulty(self, tokens: list[int]) -> Logits:
        begin, end = self.n_past, self.n_past + len(tokens)

        def again() -> None:
            self.n_past = end + 1  # whatever lies there
            self.native.llama_memory_seq_rm(self.memory, 0, begin, -1)
            self.n_past = begin
            Session.decode(self, tokens, logits="none")

        if self.fault == "position":
            native = self.native
            self.native = _LowerLast(native, self._positions)
            try:
                rows = super().decode(tokens)
            finally:
                self.native = native
        elif self.fault == "rollback":
            with _unwatched():
                super().decode([(tokens[0] + 1) % self.model.n_vocab], logits="none")
            rows = super().decode(tokens)
        elif self.fault == "mask":
            self.native.llama_set_causal_attn(self._pointer, False)
            rows = super().decode(tokens)
            self.native.llama_set_causal_attn(self._pointer, True)
        else:
            return self._after_another_prompt(tokens)
        self.n_past, self._undo = end, again
        return rows

    def _after_another_prompt(self, tokens: list[int]) -> Logits:
        end = self.n_past + len(tokens)

        def again() -> None:
            self.clear()
            Session.prefill(self, self._prompt)
            Session.decode(self, tokens, logits="none")
            self.n_past = end

        with _unwatched():
            self.clear()
            Session.decode(self, self._prompt[:_OTHER_PROMPT], logits="none")
            Session.prefill(self, self._prompt)
        rows = Session.decode(self, tokens)
        self.n_past, self._undo = end, again
        return rows


class _LowerLast:
    """The native library, but the last token of a pass gets the position before its own."""

    def __init__(self, native: Any, positions: Any) -> None:
        self._native = native
        self._positions = positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def llama_decode(self, context: Any, batch: Any) -> Any:
        self._positions[batch.n_tokens - 1] -= 1
        return self._native.llama_decode(context, batch)


class _FaultyWatch(Watch):
    """The watch of the session with the fault: it looks away while a fault is prepared or taken back."""

    current: _FaultyWatch | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _FaultyWatch.current = self


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    watch = _FaultyWatch.current
    before = watch is not None and watch.active
    if watch is not None:
        watch.active = False
    try:
        yield
    finally:
        if watch is not None:
            watch.active = before


def planted(*, fault: str, after: int, inner: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Child: run a measuring function (``inner``, as ``module:function``) on sessions with a logic fault.

    Raises:
        UserError: there is no such fault.
    """
    if fault not in LOGIC_FAULTS:
        raise UserError(f"there is no fault {fault!r}", f"Known: {', '.join(LOGIC_FAULTS)}.")
    name, _, called = inner.partition(":")
    module = importlib.import_module(name)
    faulty = type("PlantedSession", (FaultySession,), {"fault": fault, "after": after})
    with contextlib.ExitStack() as stack:
        for attribute, value in (("Session", faulty), ("Watch", _FaultyWatch)):
            if hasattr(module, attribute):
                stack.callback(setattr, module, attribute, getattr(module, attribute))
                setattr(module, attribute, value)
        yield from getattr(module, called)(**arguments)
