"""Where a result comes from: the commit, the machine, the versions, and the code that measured.

``code_version`` is the part that enters a unit's key: a hash over the measuring module and every module of this
package that it imports, comments and docstrings left out, so that editing prose reruns nothing and editing one
function reruns what depends on it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from hiraishin import paths

PACKAGE = Path(__file__).resolve().parent

# Modules that carry results about but cannot change a measured value.
_NEUTRAL = {
    "",
    "errors",
    "paths",
    "results",
    "bundle",
    "provenance",
    "profile",
    "worker",
    "cli",
    "run",
    "claims",
    "builds",
    "progress",
    "prompts",
    "models",
    "tasks",
}


def _imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hiraishin":
            rest = node.module.split(".")[1:]
            found.update([rest[0]] if rest else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("hiraishin."))
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [
                child
                for child in node.body
                if not (
                    isinstance(child, ast.Expr)
                    and isinstance(child.value, ast.Constant)
                    and isinstance(child.value.value, str)
                )
            ]
    return tree


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[frozenset[str], str]:
    """What a module imports from this package, and a hash of its code. A plan asks for the same modules hundreds of times."""
    tree = ast.parse(text)
    imports = frozenset(_imports(tree))
    # The dump, not the text: comments and layout do not count, names and numbers do.
    return imports, hashlib.sha256(ast.dump(_without_docstrings(tree)).encode()).hexdigest()


def code_version(module: str) -> str:
    """Hash of a measuring module (``"replay"``) and of all it imports from this package, 16 hex digits.

    Raises:
        FileNotFoundError: there is no such module in the package.
    """
    seen: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or (name in _NEUTRAL and name != module):
            continue
        path = PACKAGE / f"{name}.py"
        if not path.exists():
            path = PACKAGE / name / "__init__.py"
        imports, seen[name] = _parsed(path.read_text(encoding="utf-8"))
        todo.extend(imports)
    return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()[:16]


@functools.cache
def commit() -> dict[str, Any]:
    """The repository's commit and whether tracked files differ from it; nulls outside a git checkout of its own."""
    # Inside a git hook these name another repository.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(paths.ROOT), *arguments],
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="surrogateescape",
                timeout=20,
                check=False,
                env=environment,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != paths.ROOT:  # a copy without history, perhaps inside somebody's repository
        return {"commit": None, "dirty": None}
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


@functools.cache
def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and, if there is one, the GPU. No host name, no user name."""
    import psutil

    cpu = {"name": platform.processor() or platform.machine(), "features": ""}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                cpu["name"] = value.strip()
            if key.strip() == "flags":
                wanted = {"avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"}
                cpu["features"] = " ".join(sorted(wanted & set(value.split())))
                break
    except OSError:
        pass
    facts: dict[str, Any] = {
        "cpu": cpu["name"],
        "cpu_features": cpu["features"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gpu": _gpu(),
    }
    return facts


def _gpu() -> dict[str, Any] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            name = pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            return {
                "name": name if isinstance(name, str) else name.decode(),
                "compute_capability": f"{major}.{minor}",
                "memory_gb": round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 1e9, 1),
                "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            }
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no package, no driver, no device: all mean that there is no GPU to describe
        return None


def versions() -> dict[str, str]:
    """Versions of the packages that a result may depend on; absent ones are left out."""
    found = {"python": sys.version.split()[0]}
    for name in ("llama-cpp-python", "numpy", "pandas", "pyarrow", "gguf", "matplotlib", "papermill", "nbconvert"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The provenance of a result that is measured now."""
    return {**commit(), "machine": machine(), "versions": versions()}
