"""How the command line begins and ends: the locale, signals, errors in one message, and what exit statuses mean.

Verbs end with 0, or with 1 where they give a verdict. Everything else is an error: 2 is something that the user can
mend, 3 a measurement that failed, 70 a bug here, 128 plus its number a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from typer.core import TyperGroup

from hiraishin import paths
from hiraishin.errors import UserError

BUG = 70
"""Exit status of a bug: never 1, which is a verdict of ``replay``, ``localize`` and ``audit``."""


class Stopped(UserError):
    """Ctrl-C, or a signal that asks the process to end. ``notes`` say what was kept."""

    def __init__(self, cause: KeyboardInterrupt) -> None:
        kept = " ".join(getattr(cause, "__notes__", [])) or f"what was measured is stored in {paths.results_dir()}."
        number = cause.number if isinstance(cause, _Signal) else signal.SIGINT
        next_time = "starts again" if getattr(cause, "nothing_kept", False) else "goes on from there"
        super().__init__(f"stopped: {kept}", f"The same command {next_time}.", exit_code=128 + number)


@contextmanager
def nothing_kept(what: str) -> Iterator[None]:
    """For work that stores nothing before it ends: whoever stops it is told so."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(f"{what} keeps nothing before it ends.")
        stop.nothing_kept = True  # type: ignore[attr-defined]
        raise


class _Signal(KeyboardInterrupt):
    """A signal that ends what Ctrl-C would end, in the same way: children, kernels, temporary files."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Verbs(TyperGroup):
    """The verbs. Ctrl-C and a reader that went away are ours to handle: typer exits with 1, or without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as cause:
            raise Stopped(cause) from cause
        except BrokenPipeError:
            _leave_reader()


def printable(text: str) -> str:
    """The text without what a terminal would act on: control characters that a model file or a log brought along."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _use_utf8() -> None:
    """Start over in Python's UTF-8 mode if the locale has another encoding: names of folders must reach the children."""
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _end_like_ctrl_c() -> None:
    """SIGTERM and SIGHUP stop a run as Ctrl-C does, unless the caller has them ignored (``nohup``)."""

    def stop(number: int, _frame: object) -> None:
        raise _Signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)


def _trace() -> None:
    if os.environ.get("HIRAISHIN_DEBUG"):
        traceback.print_exc()


def _leave_reader() -> NoReturn:
    """Nobody reads on (``| head``): end as a program that does not catch SIGPIPE does."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.exit(128 + signal.SIGPIPE)


def _fail(what: str, exit_code: int) -> NoReturn:
    print(f"hiraishin: {printable(what)}", file=sys.stderr)
    sys.exit(exit_code)


def run_app(app: Callable[[], object]) -> None:
    """Run the verbs: an error for the user is one message and an exit status; tracebacks need ``--debug``."""
    _use_utf8()
    _end_like_ctrl_c()
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk is still an error
    except UserError as error:
        if not isinstance(error, Stopped):
            _trace()
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt as cause:
        _fail(str(Stopped(cause)), Stopped(cause).exit_code)
    except BrokenPipeError:
        _leave_reader()
    except OSError as error:
        _trace()
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}. What was stored is kept. (--debug shows where it happened.)", 2)
    except Exception:
        traceback.print_exc()
        _fail("this is a bug of hiraishin, and no verdict. What was stored is kept.", BUG)
