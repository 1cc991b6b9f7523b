"""Reports that are killed, stopped or made twice at once: the old site stays whole, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hard_runs import alive, variables, wait_until
from report_site import write_notebook

from hiraishin.report import execute, folders
from hiraishin.report.check import MARKER

FINISH = """
import os, signal, sys
from pathlib import Path
from hiraishin.report import folders
out, moment = Path(sys.argv[1]), sys.argv[2]
stage = folders.start(out)
(stage / "index.html").write_text(sys.argv[3])
replace = os.replace
def killed(source, target):
    if moment == "between" and Path(source) == stage:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
if moment == "before":
    os.kill(os.getpid(), signal.SIGKILL)
folders.finish(stage, out, {"ok": True})
"""


def _report(out: Path, moment: str, text: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", FINISH, str(out), moment, text], env=variables(None))


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_killed_report_loses_no_older_one_and_is_cleared_up(tmp_path: Path, moment: str) -> None:
    out = tmp_path / "html"
    assert _report(out, "never", "old").wait() == 0
    assert _report(out, moment, "half").wait() == -signal.SIGKILL
    assert folders.start(out).is_dir()
    assert (out / "index.html").read_text(encoding="utf-8") == "old"
    assert json.loads((out / MARKER).read_text(encoding="utf-8")) == {"ok": True}
    stage, kept = sorted(path.name for path in tmp_path.iterdir())
    assert (stage.startswith(f".html.{os.getpid()}-"), kept) == (True, "html")


def test_reports_at_once_leave_one_of_them_whole(tmp_path: Path) -> None:
    out = tmp_path / "html"
    running = [_report(out, "never", f"report {n}") for n in range(6)]
    assert [run.wait() for run in running] == [0] * 6
    assert (out / "index.html").read_text(encoding="utf-8").startswith("report ")
    assert (out / MARKER).is_file() and (out / "assets").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["html"]


EXECUTE = """
import pathlib, sys
from hiraishin.report.execute import execute_all
(done,) = execute_all([pathlib.Path(sys.argv[1])], {"profile": "default"}, "")
print("reused" if done.reused else done.what or "run")
"""


def _execute(notebook: Path, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", EXECUTE, str(notebook)],
        env=variables(home, HIRAISHIN_HOME=home.name),
        cwd=home.parent,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.hard
def test_the_notebooks_of_two_reports_at_once_run_once(tmp_path: Path) -> None:
    # A relative home, and a file of the working directory that must not be taken for a module.
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "json.py").write_text("raise SystemExit('taken for a module')")
    home = tmp_path / "work" / "home"
    check = f"import time\nfrom hiraishin import paths\ntime.sleep(1)\nassert str(paths.home()) == {str(home)!r}, paths.home()"
    notebook = write_notebook(tmp_path / "01.ipynb", check)
    both = [_execute(notebook, home) for _ in range(2)]
    assert sorted(run.communicate(timeout=120)[0].strip() for run in both) == ["reused", "run"]


@pytest.mark.slow
def test_a_report_that_is_killed_leaves_no_runner_and_no_kernel_behind(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    notebook = write_notebook(tmp_path / "01.ipynb", f"open({str(mark)!r}, 'w').close()\nimport time\ntime.sleep(600)")
    run = _execute(notebook, tmp_path / "home")
    wait_until(mark.exists)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 2  # papermill's process and the kernel
    run.kill()
    run.communicate()
    wait_until(lambda: not any(map(alive, children)), 30)


@pytest.mark.hard
def test_eight_notebooks_at_once_ten_times_over_all_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "AT_ONCE", 8)
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    notebooks = [write_notebook(tmp_path / f"{n:02}.ipynb", "print('fine')") for n in range(8)]
    for turn in range(10):
        done = execute.execute_all(notebooks, {"profile": "default"}, str(turn))
        assert [nb.what for nb in done] == [""] * 8
        assert not any(nb.reused for nb in done)
