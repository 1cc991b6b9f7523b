"""Progress of long work: rich in a terminal, tqdm in a notebook, plain lines in a log file; always an estimate."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self


class _Bar(Protocol):
    def show(self, done: float, total: float, text: str) -> None: ...
    def close(self) -> None: ...


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules and "IPython" in sys.modules


class _Rich:
    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=None, title=title)
        self._progress.start()

    def show(self, done: float, total: float, text: str) -> None:
        self._progress.update(self._task, completed=done, total=total, description=text)

    def close(self) -> None:
        self._progress.stop()


class _Tqdm:
    def __init__(self, title: str) -> None:
        from tqdm.auto import tqdm

        self._bar: Any = tqdm(
            desc=title, bar_format="{desc}: {percentage:3.0f} % |{bar}| {elapsed} left {remaining} {postfix}"
        )

    def show(self, done: float, total: float, text: str) -> None:
        self._bar.total = total
        self._bar.n = done
        self._bar.set_postfix_str(text, refresh=True)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """A line each 15 seconds at first, later each twentieth of the time so far: a hundred lines for hours, no carriage
    returns, fit for a log file.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = self._last = time.monotonic()

    def show(self, done: float, total: float, text: str) -> None:
        now = time.monotonic()
        spent = now - self._started
        if now - self._last < max(15, spent / 20) and done < total:
            return
        self._last = now
        left = f", about {spent * (total - done) / done:.0f} s left" if 0 < done < total else ""
        print(
            f"{self._title}: {100 * done / max(total, 1e-9):.0f} % after {spent:.0f} s{left}: {text}",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        return


class Progress:
    """A context manager that shows how far a known amount of work is.

    Args:
        title: what is being done.
        total: the amount of work, in any unit.
        quiet: show nothing.
    """

    def __init__(self, title: str, total: float, *, quiet: bool = False) -> None:
        self.total = total
        self.done = 0.0
        self._bar: _Bar | None = None
        if not quiet and total > 0:
            self._bar = _Tqdm(title) if _in_notebook() else _Rich(title) if sys.stderr.isatty() else _Lines(title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, amount: float, text: str = "") -> None:
        """Report ``amount`` more of the work as done."""
        self.done += amount
        if self._bar is not None:
            self._bar.show(min(self.done, self.total), self.total, text)
