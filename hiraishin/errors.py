"""Errors that are written for the person at the keyboard: what happened, on which input, what to do next."""

from __future__ import annotations


class UserError(Exception):
    """A condition the user can act on. The command line prints it as one message, without a traceback.

    Args:
        what: what happened and on which input.
        hint: what to do next; empty when there is nothing to add.
        exit_code: the process's exit status, 2 unless the verb says otherwise.
    """

    def __init__(self, what: str, hint: str = "", *, exit_code: int = 2) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return (
            f"{self.what}. {self.hint}"
            if self.hint and not self.what.endswith(".")
            else f"{self.what} {self.hint}".strip()
        )


class NativeCrash(UserError):
    """The measuring child process died in native code (an abort, a signal, out of memory).

    ``signal`` is the signal's name or ``None`` when the child exited by itself, ``log`` the last native lines.
    """

    def __init__(self, what: str, *, signal: str | None, log: list[str]) -> None:
        tail = "\n  ".join(log[-8:])
        super().__init__(what, f"Last native log lines:\n  {tail}" if tail else "", exit_code=3)
        self.signal = signal
        self.log = log
