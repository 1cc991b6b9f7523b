"""Run one notebook with papermill, in a process of its own: ``python -m hiraishin.report.kernel_run REQUEST.json``.

The request names the notebook, where the executed copy goes, its parameters, and where the outcome goes. The
outcome file is written last and only by a run that came to its end; a missing one means that this process died.
Neither the saved notebook nor its metadata is evidence: after the kernel's death papermill saves one that says
``completed``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(request_path: str) -> int:
    """Execute, write the outcome, and exit 0 (fine), 1 (a cell failed), 3 (the kernel died) or 4 (anything else)."""
    from hiraishin.worker import die_with_parent

    die_with_parent()
    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    outcome: dict[str, Any]
    # Sockets in a short folder: no TCP ports that parallel runs could fight over, and no path over 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hk", dir="/tmp" if os.path.isdir("/tmp") else None) as sockets:
        os.environ["JUPYTER_RUNTIME_DIR"] = sockets
        os.environ.setdefault("IPYTHONDIR", os.path.join(sockets, "ipython"))
        os.environ.setdefault("JUPYTER_CONFIG_DIR", os.path.join(sockets, "config"))
        outcome = _execute(request, sockets)
    partial = Path(request["outcome"] + ".partial")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    os.replace(partial, request["outcome"])
    return int(outcome["exit"])


def _execute(request: dict[str, Any], sockets: str) -> dict[str, Any]:
    import papermill
    from jupyter_client.manager import AsyncKernelManager
    from papermill.exceptions import PapermillExecutionError

    manager = AsyncKernelManager(
        kernel_name="python3", transport="ipc", connection_file=os.path.join(sockets, "k.json")
    )
    try:
        papermill.execute_notebook(
            _literal(request["notebook"]),
            _literal(request["output"]),
            parameters=request["parameters"],
            kernel_name="python3",
            progress_bar=False,
            cwd=request["cwd"],
            start_timeout=120,
            km=manager,
        )
    except PapermillExecutionError as error:
        what = f"{error.ename}: {error.evalue}"
        return {"exit": 1, "what": what[:2000], "cell": error.cell_index, "signal": None}
    except Exception as error:  # whatever it is, it is this notebook's failure, never a pass
        code = _kernel_exit_code(manager)
        if code is not None and code != 0:
            name = signal.Signals(-code).name if code < 0 else None
            what = f"the kernel was ended by {name}" if name else f"the kernel ended with status {code}"
            return {"exit": 3, "what": what, "cell": _last_started_cell(request["output"]), "signal": name}
        return {"exit": 4, "what": f"{type(error).__name__}: {error}"[:2000], "cell": None, "signal": None}
    finally:
        process = getattr(getattr(manager, "provisioner", None), "process", None)
        if process is not None and process.poll() is None:
            process.kill()  # papermill leaves a manager it was given running
    return {"exit": 0, "what": "", "cell": None, "signal": None}


def _literal(path: str) -> str:
    """papermill formats paths with the parameters; a brace in a folder's name must stay a brace."""
    return path.replace("{", "{{").replace("}", "}}")


def _kernel_exit_code(manager: Any) -> int | None:
    process = getattr(getattr(manager, "provisioner", None), "process", None)
    return None if process is None else process.poll()


def _last_started_cell(saved: str) -> int | None:
    """The cell that was running: the last one with a start time (their ``status`` is not to be trusted)."""
    try:
        cells = json.loads(Path(saved).read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return None
    started = [i for i, c in enumerate(cells) if c.get("metadata", {}).get("papermill", {}).get("start_time")]
    return started[-1] if started else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
