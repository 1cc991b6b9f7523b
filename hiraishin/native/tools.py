"""Compilers and build tools: what is here, is it new enough, and which package brings it.

Tools come from the ``PATH`` first and from the virtual environment second, which always holds cmake and ninja (they
are in ``requirements.lock``), so that Python, make and a C++ compiler are all a machine must bring.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hiraishin import paths
from hiraishin.errors import UserError

Version = tuple[int, ...]

# name: (lowest version that works, Debian and Ubuntu package, Fedora package, what it is for)
NEEDED: dict[str, tuple[Version, str, str, str]] = {
    "c++": ((9,), "g++", "gcc-c++", "the native builds are C++17"),
    "cc": ((9,), "gcc", "gcc", "ggml is partly C"),
    "cmake": ((3, 21), "cmake", "cmake", "configures the native builds"),
    "ninja": ((1, 10), "ninja-build", "ninja-build", "runs the native builds"),
    "patch": ((2, 5), "patch", "patch", "applies the patch series"),
    "make": ((3, 81), "make", "make", "runs the README's two commands"),
    "nvcc": ((11, 8), "nvidia-cuda-toolkit", "cuda-toolkit", "compiles the CUDA backend"),
}

# CXX and CC are CMake's own way to choose a compiler; the names after them are the ones CMake tries.
_CANDIDATES = {
    "c++": ("c++", "g++", "clang++"),
    "cc": ("cc", "gcc", "clang"),
    "ninja": ("ninja", "ninja-build"),
}
_FROM_ENVIRONMENT = {"c++": "CXX", "cc": "CC", "nvcc": "CUDACXX"}


@dataclass(frozen=True)
class Tool:
    """A program that starts: its path, its version (empty when it tells none) and the first line it prints about it."""

    name: str
    path: str
    version: Version
    banner: str

    @property
    def version_text(self) -> str:
        """The version as it is written, ``"12.2.0"``."""
        return ".".join(map(str, self.version)) or "unknown"


def environment_dir() -> Path:
    """Where the virtual environment is or goes: ``VENV``, else ``.venv`` in the clone, else in ``HIRAISHIN_HOME``.

    The last one is for a clone that cannot be written to.
    """
    if value := os.environ.get("VENV", "").strip():
        return Path(os.path.abspath(os.path.expanduser(value)))
    inside = paths.ROOT / ".venv"
    if inside.exists() or os.access(paths.ROOT, os.W_OK):
        return inside
    return paths.home() / "venv"


def search_path() -> str:
    """The ``PATH`` to look on and to run builds with: the caller's, then the virtual environment's programs."""
    usual = os.environ.get("PATH") or os.defpath
    return os.pathsep.join([usual, str(environment_dir() / "bin"), "/usr/local/cuda/bin"])


def _first_lines(path: str, *arguments: str) -> list[str]:
    """What the program prints when asked for its version; empty when it does not start or fails."""
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
        if done.returncode == 0
        else []
    )


def _ask(name: str, path: str) -> Tool | None:
    lines = _first_lines(path, "--version")
    if not lines:
        return None  # a shim that starts nothing counts as missing
    banner = lines[0]
    if name == "nvcc":
        banner = next((line for line in lines if "release" in line), banner)
    # gcc and clang write the distribution's version into the banner too, so the number alone is asked for.
    numbers = _first_lines(path, "-dumpfullversion", "-dumpversion") if name in ("c++", "cc") else []
    found = re.search(r"\d+(\.\d+)*", (numbers or [banner.partition("release")[2] or banner])[0])
    return Tool(name, path, tuple(map(int, found.group().split("."))) if found else (), banner)


def find(name: str) -> Tool | None:
    """The first program for ``name`` (a key of ``NEEDED``) that starts and is new enough.

    When none is, the first that starts at all, so that the caller can say how old it is; ``None`` without one.
    """
    candidates: tuple[str, ...] = _CANDIDATES.get(name, (name,))
    if chosen := os.environ.get(_FROM_ENVIRONMENT.get(name, ""), "").strip():
        candidates = (chosen,)  # a compiler asked for by name is that one or an error, never another
    too_old: Tool | None = None
    for candidate in candidates:
        for folder in search_path().split(os.pathsep):
            path = shutil.which(candidate, path=folder)
            tool = _ask(name, path) if path else None
            if tool and tool.version >= NEEDED[name][0]:
                return tool
            too_old = too_old or tool
    return too_old


def need(name: str) -> Tool:
    """Like ``find``, but an unusable tool is an error that names the package.

    Raises:
        UserError: missing, not startable, or older than what works.
    """
    lowest, debian, fedora, purpose = NEEDED[name]
    tool = find(name)
    hint = f"Install it with: apt-get install {debian} (Debian, Ubuntu) or dnf install {fedora} (Fedora)."
    variable = _FROM_ENVIRONMENT.get(name, "")
    chosen = os.environ.get(variable, "").strip() if variable else ""
    if tool is None:
        what = f"{name} not found ({purpose})" if not chosen else f"{variable}={chosen} does not start ({purpose})"
        raise UserError(what, hint)
    if tool.version < lowest:
        wanted = ".".join(map(str, lowest))
        raise UserError(f"{tool.path} is version {tool.version_text}, {wanted} or later is needed ({purpose})", hint)
    return tool
