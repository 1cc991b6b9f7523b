"""The virtual environment: every package from ``requirements.lock``, the binding's Python side, and this package.

uv does the installing if the machine has it, pip otherwise. A stamp is written last; it holds what the environment was
made from, so a second call returns at once, a changed lock installs what changed, and an interrupted call starts over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native import tools
from hiraishin.native.fetch import download_error, fetch, make_folder, pins, run_pip

STAMP = "hiraishin.stamp"


@contextlib.contextmanager
def only_one(lock: Path, doing: str) -> Iterator[None]:
    """Holds ``lock`` while the block runs; a second process says once what it waits for, then waits.

    Child processes started with ``close_fds=False`` hold it too. So after a kill the next call waits until the last
    orphaned compiler or installer has ended, and never works beside it in the same folder.
    """
    make_folder(lock.parent)
    with lock.open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is {doing}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """One line of progress."""
    print(f"[set-up] {text}", file=sys.stderr, flush=True)


def _made_from() -> dict[str, str]:
    """What decides whether the environment is up to date. Which Python made it does not, as long as that still starts."""
    lock = (paths.ROOT / "requirements.lock").read_text(encoding="utf-8")
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [lock, project["project"], project["build-system"], pins()["llama_cpp_python"]]
    return {
        "root": str(paths.ROOT),  # the environment's scripts and the link to this package hold it
        "place": str(tools.environment_dir()),
        "packages": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
    }


def _stamp_text() -> str:
    return "".join(f"{name}: {value}\n" for name, value in _made_from().items())


def is_ready() -> bool:
    """Whether the environment is there and was made from what the repository pins now."""
    place = tools.environment_dir()
    try:
        same = (place / STAMP).read_text(encoding="utf-8", errors="surrogateescape") == _stamp_text()
    except OSError:
        return False
    return same and os.access(place / "bin" / "python", os.X_OK)


def ensure() -> Path:
    """The environment's Python, after making or mending the environment if need be.

    Raises:
        UserError: no compiler, no venv module, no network, wrong checksum, disk full, no permission.
    """
    place = tools.environment_dir()
    if not is_ready():
        tools.need("c++")  # said now, in a second, rather than after minutes of downloads
        make_folder(place.parent)
        with only_one(paths.home() / "environment.lock", "setting up the environment"):
            if not is_ready():
                _make(place)
    return place / "bin" / "python"


def _make(place: Path) -> None:
    started = time.monotonic()
    uv = shutil.which("uv")
    stamp = place / STAMP
    try:
        before = stamp.read_text(encoding="utf-8", errors="surrogateescape").splitlines()[:2]
    except OSError:
        before = []  # never made, or interrupted
    if before != _stamp_text().splitlines()[:2] or not os.access(place / "bin" / "python", os.X_OK):
        say(f"virtual environment in {place}")
        _create(place)
    stamp.unlink(missing_ok=True)

    say(f"packages from requirements.lock, with {'uv' if uv else 'pip'}")
    wanted = ["--require-hashes", "--only-binary", ":all:", "--requirement", str(paths.ROOT / "requirements.lock")]
    _install(place, uv, wanted, "the packages in requirements.lock")
    say("source package of llama.cpp and its binding (77 MB, once)")
    sdist = fetch("llama_cpp_python", paths.sources_dir())
    say("Python side of the binding")
    local = [
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--config-settings",
        "cmake.define.LLAMA_BUILD=OFF",
        str(sdist),
    ]
    _install(place, uv, local, "llama-cpp-python")
    _install(place, uv, ["--no-deps", "--no-index", "--no-build-isolation", "--editable", str(paths.ROOT)], "hiraishin")

    temporary = stamp.with_suffix(".new")
    temporary.write_text(_stamp_text(), encoding="utf-8", errors="surrogateescape")
    temporary.replace(stamp)
    say(f"environment ready after {time.monotonic() - started:.0f} s")


def _create(place: Path) -> None:
    """A fresh environment with pip in it, in place of whatever was there."""
    if place.exists() and not (place / "pyvenv.cfg").exists() and any(place.iterdir()):
        raise UserError(f"{place} exists and is no virtual environment", "Move it away, or set VENV to another folder.")
    # Not the running interpreter if that is itself inside an environment: an environment of an environment dies with it.
    python = getattr(sys, "_base_executable", None) or sys.executable
    done = run_pip([python, "-m", "venv", "--clear", str(place)])
    if done.returncode:
        log = done.stdout + done.stderr
        if "ensurepip" in log or "No module named venv" in log:
            raise UserError(
                f"{python} cannot make virtual environments",
                "Install them with: apt-get install python3-venv (Debian, Ubuntu).",
            )
        raise download_error("a virtual environment", log)


def _install(place: Path, uv: str | None, arguments: list[str], what: str) -> None:
    python = str(place / "bin" / "python")
    if uv:
        done = run_pip([uv, "pip", "install", "--quiet", "--python", python, *arguments])
        if done.returncode == 0:
            return
        # uv and pip read different index settings; what one cannot reach the other may.
        say(f"uv could not install {what}; trying pip")
    done = run_pip([python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments])
    if done.returncode:
        raise download_error(what, done.stdout + done.stderr)


def main() -> int:
    """``make setup``: makes the environment, with progress on standard error; prints the path of its Python."""
    try:
        print(ensure())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the next call starts over", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: {error.strerror} ({error.filename}). Mend that and start again.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
