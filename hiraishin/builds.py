"""A native build: where its libraries are, what they were made from, and whether they can run here.

Nothing is loaded into this process: two builds in one process would share the first one's ``libggml``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native.compile import read_description, recipe
from hiraishin.native.fetch import sha256


@dataclass(frozen=True)
class Build:
    """A folder of libraries that measurements can run on.

    Attributes:
        name: ``"stock"`` or ``"patched"``; for a folder given by its path, the folder's name.
        backend: ``"cpu"`` or ``"cuda"``.
        lib_dir: absolute path of the folder with ``libllama.so`` and ``libggml*.so``.
        description: ``build.json``; for a library built elsewhere only the hashes of its files.
        abi: ``abi.json``, the struct layout of the build's own headers; empty for a library built elsewhere.
    """

    name: str
    backend: str
    lib_dir: Path
    description: dict[str, Any]
    abi: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides what the build computes, as hexadecimal digits.

        Source, patches in their order, flags, compiler, and processor or GPU architecture; no paths and no dates, so
        the same build made twice has the same one. A library built elsewhere is known by its bytes alone.
        """
        known = self.description
        made_from = recipe(known) if "source" in known else {"libraries": known["libraries"]}
        text = json.dumps(made_from, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def find_build(name: str, backend: str = "cpu") -> Build:
    """The finished build called ``name``.

    Raises:
        UserError: it is missing or not whole (the hint is the command that makes it), or this machine's processor lacks
            instructions that it was compiled for.
    """
    folder = paths.builds_dir() / backend / name
    described = read_description(folder)
    if described is None:
        state = "is not whole" if folder.exists() else "is missing"
        more = "" if backend == "cpu" else f" --backend {backend}"
        raise UserError(
            f"the {backend} {name} build {state} (looked in {folder})", f"Make it with: ./build.sh {name}{more}"
        )
    return _checked(Build(name, backend, folder, described, _abi(folder)))


def ensure_builds(backend: str = "cpu", echo: Callable[[str], object] = print) -> None:
    """Makes the stock and the patched build if they are missing or out of date (a second or less if they are not).

    Args:
        backend: ``"cpu"`` or ``"cuda"``.
        echo: gets each line of progress.

    Raises:
        UserError: what ``build.sh`` said, with its exit status.
    """
    # -P: a file of the caller's folder must not be taken for a module.
    command = [sys.executable, "-P", "-m", "hiraishin.native", "all", "--backend", backend]
    if origin := _foreign_origin(backend):
        command += ["--source", origin]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=variables | {"PYTHONUTF8": "1"},
    ) as process:
        assert process.stdout is not None
        error: list[str] = []
        try:
            for line in process.stdout:
                if error or line.startswith("error: "):
                    error.append(line.rstrip())
                else:
                    echo(line.rstrip())
        except BaseException:
            process.send_signal(signal.SIGINT)  # in case the one who pressed Ctrl-C was not a terminal
            raise
    if process.returncode:
        what = "\n".join(error).removeprefix("error: ") or f"build.sh ended with status {process.returncode}"
        raise UserError(what, exit_code=process.returncode if process.returncode > 0 else 2)


def _foreign_origin(backend: str) -> str | None:
    """The ``--source`` that the present builds were made from, so that they are not replaced by the pinned ones."""
    described = read_description(paths.builds_dir() / backend / "patched") or read_description(
        paths.builds_dir() / backend / "stock"
    )
    origin = (described or {}).get("source", {}).get("origin")
    return origin if isinstance(origin, str) else None


def describe_library(folder: str | os.PathLike[str]) -> Build:
    """A ``Build`` for any folder with a libllama, made here or elsewhere.

    The folder is checked in a child process: its libllama must load (so that everything it depends on is there) and have
    every function that the Python side declares.

    Args:
        folder: absolute or relative path.

    Raises:
        UserError: no such folder, a file, empty, without libllama or libggml, cannot be loaded, lacks a function.
    """
    path = Path(os.path.abspath(os.path.expanduser(folder)))
    hint = "Give the folder that holds libllama.so and libggml.so, such as a llama.cpp build's bin folder."
    if not path.exists():
        raise UserError(f"library folder {path} does not exist", hint)
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a folder", hint)
    if not any(path.iterdir()):
        raise UserError(f"library folder {path} is empty", hint)
    for library in ("libllama", "libggml-base", "libggml"):
        if not any(path.glob(f"{library}.so*")):
            raise UserError(f"library folder {path} has no {library}.so", hint)
    libllama = path / "libllama.so"
    if not libllama.exists():
        raise UserError(f"library folder {path} has {next(path.glob('libllama.so*')).name} but no libllama.so", hint)
    described = read_description(path)
    if described is not None:
        _checked(Build(described["name"], described["backend"], path, described, {}))
    _check_loads(libllama)
    if described is not None:
        return Build(described["name"], described["backend"], path, described, _abi(path))
    libraries = {
        file.name: sha256(file) for file in sorted(path.glob("lib*.so")) if re.match(r"lib(llama|ggml)", file.name)
    }
    backend = "cuda" if any(path.glob("libggml-cuda.so*")) else "cpu"
    return Build(path.name or "root", backend, path, {"libraries": libraries}, _abi(path))


def _abi(folder: Path) -> dict[str, Any]:
    try:
        loaded = json.loads((folder / "abi.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _checked(build: Build) -> Build:
    """The build, if this processor has the instructions it was compiled for."""
    wanted = set(build.description.get("cpu", {}).get("features", []))
    here = _cpu_features()
    if here and (lacking := sorted(wanted - here)):
        raise UserError(
            f"the build in {build.lib_dir} uses instructions that this processor lacks: {', '.join(lacking)}",
            "It was made on another machine. Make it here with ./build.sh.",
        )
    return build


@functools.cache
def _cpu_features() -> frozenset[str]:
    """The kernel's names of what this processor can do; empty when the system does not tell."""
    if platform.system() != "Linux":
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()


def binding_functions() -> list[str]:
    """The functions of libllama that the Python side looks up as soon as it is imported (found without importing it).

    Raises:
        UserError: llama-cpp-python is not installed.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("llama-cpp-python is not installed", "Make the environment with: make setup")
    text = (Path(spec.submodule_search_locations[0]) / "llama_cpp.py").read_text(encoding="utf-8")
    return re.findall(r'^@ctypes_function\(\s*"(\w+)"', text, re.MULTILINE)


_LOAD = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
print(json.dumps([name for name in json.loads(sys.stdin.read()) if not hasattr(library, name)]))
"""


def _check_loads(libllama: Path) -> None:
    """Loads the library in a child process and looks every function up."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(libllama)],
        input=json.dumps(binding_functions()),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode < 0:
        raise UserError(
            f"{libllama} crashes when it is loaded (signal {-done.returncode})", "It may be made for another processor."
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].partition(": ")[2]
        raise UserError(f"{libllama} cannot be loaded: {reason}", _what_to_do(reason))
    if missing := json.loads(done.stdout.strip().splitlines()[-1]):
        raise UserError(
            f"{libllama} lacks {missing[0]}" + (f" and {len(missing) - 1} more functions" if len(missing) > 1 else ""),
            "llama-cpp-python 0.3.36 needs them; the library is of another version.",
        )


def _what_to_do(reason: str) -> str:
    """A hint for what the loader could not find."""
    if "libcuda.so" in reason:
        return "That is the NVIDIA driver's: install the driver, or use a library built for the CPU."
    if re.search(r"lib(cudart|cublas\w*|nccl)\.so", reason):
        return "That is CUDA's: install the CUDA version it was built with, or put its folder in LD_LIBRARY_PATH."
    return "What it depends on must be in its folder or installed."
