"""The measuring child process: one per native build, so that two builds never share a loaded ggml.

The parent half is :class:`Worker`. It starts ``python -m hiraishin.worker`` with ``LLAMA_CPP_LIB_PATH`` set,
sends one JSON line a call and yields the events that come back. The child half is :func:`main`: it loads the
library, reports the path and sha256 of every libllama and libggml that was really mapped, and runs functions of
this package that are generators of plain events. A native abort kills the child alone; the parent raises
:class:`~hiraishin.errors.NativeCrash` with the signal and the last native log lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hiraishin import paths
from hiraishin.errors import NativeCrash, UserError

if TYPE_CHECKING:
    from hiraishin.builds import Build

Event = dict[str, Any]

# What would change the bits or the path of a measurement without being part of its key. A profile's or an audit's own
# settings come afterwards. OMP_*: fewer threads than the key names.
_NOT_PASSED_ON = ("GGML_", "LLAMA_", "OMP_DYNAMIC", "OMP_THREAD_LIMIT")


class Worker:
    """A child process that holds one native build.

    Use as a context manager. ``libraries`` maps the file name of each loaded libllama/libggml to its sha256.

    Raises:
        UserError: the library cannot be loaded or does not match the layout that the Python side expects.
    """

    def __init__(self, build: Build, env: Mapping[str, str] | None = None) -> None:
        self.build = build
        self.libraries: dict[str, str] = {}
        self._keep_log = False
        logs = paths.logs_dir()
        try:
            logs.mkdir(parents=True, exist_ok=True)
            _sweep(logs)
            handle, name = tempfile.mkstemp(prefix=f"native-{build.name}-", suffix=".log", dir=logs)
        except OSError as error:
            raise UserError(
                f"cannot write a native log in {logs}: {error.strerror}",
                "Free some space or set HIRAISHIN_HOME to a folder that can be written.",
            ) from error
        self.log_path = Path(name)
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)},
            "LLAMA_CPP_LIB_PATH": str(Path(build.lib_dir).resolve()),
            "HIRAISHIN_HOME": str(paths.home()),  # it may be relative, and the child works elsewhere
            "PYTHONUTF8": "1",
            # Where gdb is installed ggml attaches it on an abort, and its backtrace buries the assertion's own text.
            "GGML_NO_BACKTRACE": "1",
            "PYTHONPATH": os.pathsep.join([str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **(env or {}),
        }
        with os.fdopen(handle, "wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-u", "-m", "hiraishin.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd="/",
            )
        try:
            for event in self.call("hiraishin.worker:hello", abi=dict(build.abi)):
                if "return" in event:
                    self.libraries = dict(event["return"])
            self._check_libraries()
        except BaseException as error:
            self.close(at_once=isinstance(error, KeyboardInterrupt))
            raise

    def _check_libraries(self) -> None:
        """What was loaded must be what the build's description says, or results would be stored under its name."""
        described = self.build.description.get("libraries") or {}
        for name, digest in self.libraries.items():
            wanted = described.get(f"{name.split('.so')[0]}.so", digest)
            if digest != wanted:
                raise UserError(
                    f"the {name} that was loaded is not the one that {self.build.lib_dir} was described by",
                    "It was changed or replaced meanwhile (delete that folder and run ./build.sh), or another one is "
                    "found first (LD_LIBRARY_PATH).",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(at_once=kind is not None and issubclass(kind, KeyboardInterrupt))

    def log_tail(self, lines: int = 12) -> list[str]:
        """The last lines that native code wrote."""
        try:
            text = self.log_path.read_bytes()[-16384:].decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def call(self, function: str, **arguments: Any) -> Iterator[Event]:
        """Run ``module:function`` in the child and yield its events; the last one is ``{"return": value}``.

        Raises:
            NativeCrash: the child died in native code.
            UserError: the function raised one, or failed in a way that is a bug here (then with its traceback in
                the native log).
        """
        request = json.dumps({"call": function, "arguments": arguments}, allow_nan=False)
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(request.encode() + b"\n")
            self._child.stdin.flush()
        except (BrokenPipeError, OSError):
            raise self._crash(function) from None
        while True:
            line = self._child.stdout.readline()
            if not line.endswith(b"\n"):
                raise self._crash(function)
            event = json.loads(line)
            if "error" in event or "fault" in event:
                self._keep_log = True  # the message sends the reader to it
            if "error" in event:
                raise UserError(event["error"]["what"], event["error"]["hint"], exit_code=event["error"]["exit_code"])
            if "fault" in event:
                raise UserError(
                    f"{function} failed: {event['fault']}", f"The traceback is in {self.log_path.name}.", exit_code=3
                )
            yield event
            if "return" in event:
                return

    def result(self, function: str, **arguments: Any) -> Any:
        """Run a function in the child and give only its return value."""
        value = None
        for event in self.call(function, **arguments):
            value = event.get("return", value)
        return value

    def result_within(self, seconds: float, function: str, **arguments: Any) -> Any:
        """Like :meth:`result`, for what may never end: the child is killed after ``seconds``.

        Raises:
            TimeoutError: it was; this worker is of no more use.
        """
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._child.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            return self.result(function, **arguments)
        except NativeCrash as crash:
            if late.is_set():
                raise TimeoutError(f"{function} did not end within {seconds:.0f} s") from crash
            raise
        finally:
            timer.cancel()

    def _crash(self, function: str) -> NativeCrash:
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its side and lives on
            self._child.kill()
            code = self._child.wait()
        name = None
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
        how = f"was ended by {name}" if name else f"ended with exit code {code}"
        if name == "SIGKILL":
            how += " (killed from outside, or the machine ran out of memory)"
        elif name == "SIGBUS":
            how += " (the disk is full, or a file was cut short while it was read)"
        return NativeCrash(
            f"the {self.build.name} build's measuring process {how} during {function.partition(':')[2]}",
            signal=name,
            log=self.log_tail(),
        )

    def close(self, *, at_once: bool = False) -> None:
        """End the child. Never raises, never leaves a process behind.

        Args:
            at_once: do not wait for what it is doing (after Ctrl-C).
        """
        child = self._child
        if at_once:
            child.kill()
        with contextlib.suppress(OSError, ValueError):
            if child.stdin is not None:
                child.stdin.close()
        try:
            child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
        if (child.returncode == 0 or at_once) and not self._keep_log:
            with contextlib.suppress(OSError):
                self.log_path.unlink()


def _sweep(logs: Path) -> None:
    """Remove the logs of last week: of children whose parent was killed, and those that an old error named."""
    for log in logs.glob("native-*.log"):
        with contextlib.suppress(OSError):
            if time.time() - log.stat().st_mtime > 7 * 24 * 3600:
                log.unlink()


def loaded_libraries() -> dict[str, str]:
    """File name to sha256 of every libllama and libggml mapped into this process (empty off Linux)."""
    found: dict[str, str] = {}
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(("libllama", "libggml")):
            path = Path(fields[5])
            if path.name not in found and path.exists():
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def same_ggml(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    """Whether two workers loaded the very same ggml libraries: then a comparison compares a build with itself."""
    ours = {n: h for n, h in a.items() if n.startswith(("libggml", "libllama"))}
    theirs = {n: h for n, h in b.items() if n.startswith(("libggml", "libllama"))}
    return ours == theirs


def hello(abi: dict[str, Any]) -> Iterator[Event]:
    """Child: load the library, compare its layout with ours, and report what was loaded."""
    from hiraishin.binding import check_abi, load_native

    load_native()
    check_abi(abi)
    yield {"return": loaded_libraries()}


def die_with_parent() -> None:
    """This process is killed when the one that started it ends, however that ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux


def main() -> None:
    """Child: serve calls until standard input ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it closes or kills us
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever native code prints goes to the log, never into the protocol

    def reply(body: Event) -> None:
        replies.write(json.dumps(body, allow_nan=False).encode() + b"\n")
        replies.flush()

    for line in sys.stdin.buffer:
        request = json.loads(line)
        module, _, name = request["call"].partition(":")
        try:
            if not module.startswith("hiraishin."):
                raise ValueError(f"{module} is not part of hiraishin")
            returned = False
            for event in getattr(importlib.import_module(module), name)(**request["arguments"]):
                reply(event)
                returned = "return" in event
            if not returned:
                reply({"return": None})
        except UserError as error:
            body = {"what": error.what, "hint": error.hint, "exit_code": error.exit_code}
            reply({"error": body})
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            reply({"fault": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
