"""Execute the notebooks: check them first, run them two at a time, believe exit codes only, keep what is current.

An executed notebook is kept under ``<home>/executed/<profile>/`` with a marker that is written last and names
everything the outcome depends on (the notebook, the package's code, the results, the parameters). A second report
with nothing changed runs no kernel; an edited notebook reruns alone.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native.environment import only_one

AT_ONCE = 2
"""Notebooks run side by side; each is a kernel and the native process it starts."""

_EXIT_WORDS = {1: "a cell failed", 3: "the kernel died", 4: "papermill could not run it"}


@dataclass(frozen=True)
class Executed:
    """What became of one notebook. ``path`` is the executed copy, or ``None`` when nothing could be saved."""

    name: str
    title: str
    ok: bool
    what: str
    cell: int | None
    path: Path | None
    log_tail: list[str]
    seconds: float
    reused: bool = False


def check_notebook(path: Path, parameters: Mapping[str, Any]) -> str:
    """Refuse what papermill would let pass, and return the notebook's title.

    Checked: it is a notebook, exactly one code cell carries the ``parameters`` tag (without it every override is
    ignored, with exit code 0), every name exists there, every value has the type of its default.

    Raises:
        UserError: naming the notebook and what to do.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        cells = document["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path.name} cannot be read as a notebook ({error})", "Restore it with git.") from error
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", []) and c["cell_type"] == "code"]
    if len(tagged) != 1:
        raise UserError(
            f"{path.name} has {len(tagged)} cells tagged 'parameters'; exactly one is needed",
            "Tag the cell that holds the defaults (JupyterLab: property inspector, cell tags).",
        )
    defaults = _defaults(path, _source(tagged[0]))
    for name, value in parameters.items():
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise UserError(f"{path.name} has no parameter {name!r}", f"It has: {known}.")
        default = defaults[name]
        if default is not None and type(value) is not type(default):
            raise UserError(
                f"{path.name}: parameter {name!r} is {type(default).__name__}, not {type(value).__name__} ({value!r})",
                "Give a value of the default's type; quote it if it is text that looks like a number.",
            )
    return notebook_title(cells, path)


def notebook_title(cells: Sequence[Mapping[str, Any]], path: Path) -> str:
    """The first heading of the notebook, or its file name."""
    for cell in cells:
        if cell.get("cell_type") == "markdown":
            found = re.search(r"^#\s+(.+)$", _source(cell), re.MULTILINE)
            if found:
                return found.group(1).strip()
    return path.stem


def _source(cell: Mapping[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _defaults(path: Path, source: str) -> dict[str, Any]:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"{path.name}: the parameters cell is not valid Python ({error})", "Mend that cell.") from error
    found: dict[str, Any] = {}
    for node in tree.body:
        target: ast.expr | None = None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node, (ast.AnnAssign, ast.Assign)) and node.value is not None:
            try:
                found[target.id] = ast.literal_eval(node.value)
            except ValueError as error:
                raise UserError(
                    f"{path.name}: the default of {target.id!r} is no literal", "Write a plain value."
                ) from error
    return found


def execute_all(
    notebooks: Sequence[Path],
    parameters: Mapping[str, Any],
    depends_on: str,
    *,
    folder: Path | None = None,
    echo: Callable[[str], None] = lambda line: None,
) -> list[Executed]:
    """Run the notebooks, at most two at a time, and report each, in the given order. One failing stops no other.

    A second process that wants the same ones waits for the first, and then finds them done.

    Args:
        notebooks: paths of the notebooks.
        parameters: what to override, the same for all.
        depends_on: a hash of everything outside the notebook that its outcome depends on.
        folder: where executed copies are kept (default ``<home>/executed/<hash of the parameters>``).
        echo: called with one line as each notebook starts and ends.
    """
    where = (
        folder or paths.home() / "executed" / hashlib.sha256(repr(sorted(parameters.items())).encode()).hexdigest()[:12]
    )
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {where}: {error.strerror}", "Set HIRAISHIN_HOME to a folder that can be written."
        ) from error
    with only_one(where / ".lock", "running these notebooks"):
        return _execute_in(where, notebooks, parameters, depends_on, echo)


def _execute_in(
    where: Path,
    notebooks: Sequence[Path],
    parameters: Mapping[str, Any],
    depends_on: str,
    echo: Callable[[str], None],
) -> list[Executed]:
    done: dict[Path, Executed] = {}
    waiting: list[tuple[Path, str]] = []
    for path in notebooks:
        try:
            title = check_notebook(path, parameters)
        except UserError as error:
            done[path] = Executed(path.stem, path.stem, False, str(error), None, None, [], 0.0)
            echo(f"notebook {path.stem}: refused: {error}")
            continue
        kept = _kept(where, path, _key(path, parameters, depends_on), title)
        if kept is not None:
            done[path] = kept
        else:
            waiting.append((path, title))
    running: list[_Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                path, title = waiting.pop(0)
                echo(f"notebook {path.stem}: running")
                running.append(_Run(path, title, where, parameters, _key(path, parameters, depends_on)))
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                outcome = run.finish()
                done[run.path] = outcome
                echo(f"notebook {run.path.stem}: {'done' if outcome.ok else outcome.what} ({outcome.seconds:.0f} s)")
            time.sleep(0.05)
    finally:
        for run in running:  # all at once, then one after the other
            run.process.terminate()
        for run in running:
            run.stop()
    return [done[path] for path in notebooks]


def _key(path: Path, parameters: Mapping[str, Any], depends_on: str) -> str:
    body = json.dumps([hashlib.sha256(path.read_bytes()).hexdigest(), dict(parameters), depends_on], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()


def _kept(where: Path, path: Path, key: str, title: str) -> Executed | None:
    try:
        marker = json.loads((where / f"{path.stem}.done.json").read_text(encoding="utf-8"))
        saved = where / f"{path.stem}.ipynb"
        if marker["key"] != key or marker["sha256"] != hashlib.sha256(saved.read_bytes()).hexdigest():
            return None
        return Executed(path.stem, title, True, "", None, saved, [], float(marker["seconds"]), reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Run:
    """One papermill process."""

    def __init__(self, path: Path, title: str, where: Path, parameters: Mapping[str, Any], key: str) -> None:
        self.path, self.title, self.where, self.key = path, title, where, key
        self.output = where / f"{path.stem}.ipynb"
        self.marker = where / f"{path.stem}.done.json"
        self.marker.unlink(missing_ok=True)
        self.output.unlink(missing_ok=True)
        self.scratch = tempfile.TemporaryDirectory(prefix="hiraishin-nb-")
        scratch = Path(self.scratch.name)
        self.outcome_path = scratch / "outcome.json"
        request = {
            "notebook": str(path),
            "output": str(self.output),
            "parameters": dict(parameters),
            "outcome": str(self.outcome_path),
            "cwd": str(path.parent),
        }
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        self.log_path = scratch / "log.txt"
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([str(paths.ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        environment["HIRAISHIN_HOME"] = str(paths.home())  # it may be relative, and kernels work elsewhere
        environment.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        self.started = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hiraishin.report.kernel_run", str(scratch / "request.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def finish(self) -> Executed:
        """Read the outcome; believe the exit status over everything else."""
        seconds = time.monotonic() - self.started
        status = self.process.returncode
        tail = [line for line in _tail(self.log_path) if "IPKernelApp" not in line and line.strip()]
        outcome: dict[str, Any] = {}
        try:
            outcome = json.loads(self.outcome_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            if status == 0:
                status = 4
        self.scratch.cleanup()
        saved = self.output if self.output.exists() else None
        if status == 0 and outcome.get("exit") == 0 and saved is not None:
            digest = hashlib.sha256(saved.read_bytes()).hexdigest()
            partial = self.marker.with_suffix(".partial")
            partial.write_text(json.dumps({"key": self.key, "sha256": digest, "seconds": round(seconds, 1)}), "utf-8")
            os.replace(partial, self.marker)
            return Executed(self.path.stem, self.title, True, "", None, saved, [], seconds)
        words = _EXIT_WORDS.get(
            status, f"its process was ended by signal {-status}" if status < 0 else f"exit status {status}"
        )
        what = f"{words}: {outcome['what']}" if outcome.get("what") else words
        return Executed(self.path.stem, self.title, False, what, outcome.get("cell"), saved, tail[-12:], seconds)

    def stop(self) -> None:
        """End the process (Ctrl-C, or an error elsewhere); its kernel ends with it."""
        self.process.terminate()
        try:
            self.process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.scratch.cleanup()


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 16384))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rsplit("\r", 1)[-1][:500] for line in text.splitlines()]
