"""Notebooks under papermill: what is refused, what a crash looks like, and what is run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import report_synthetic as made_up
from bs4 import BeautifulSoup
from report_site import build, few_figures, write_notebook

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.report.execute import Executed, check_notebook, execute_all

REAL = sorted(paths.notebooks_dir().glob("[0-9]*.ipynb"))


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hiraishin.paths.receipts_dir", lambda: tmp_path / "no-receipts")
    few_figures(monkeypatch, ())


def run(*notebooks: Path, depends_on: str = "", profile: object = "default") -> list[Executed]:
    return execute_all(list(notebooks), {"profile": profile}, depends_on)


# Refused before anything runs ------------------------------------------------------------------------------------


def test_a_notebook_without_the_parameters_tag_is_refused(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", "1", parameters=None)
    with pytest.raises(UserError, match="0 cells tagged 'parameters'"):
        check_notebook(notebook, {"profile": "default"})


def test_an_unknown_parameter_is_refused_and_the_known_ones_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no parameter 'profil'.*It has: profile"):
        check_notebook(write_notebook(tmp_path / "n.ipynb", "1"), {"profil": "default"})


@pytest.mark.parametrize("value", [3, 3.0, True, None, ["default"]])
def test_a_parameter_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(UserError, match="is str, not"):
        check_notebook(write_notebook(tmp_path / "n.ipynb", "1"), {"profile": value})


def test_a_file_that_is_no_notebook_is_named_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "01.ipynb").write_text("<html>", encoding="utf-8")
    good = write_notebook(tmp_path / "02.ipynb", "1")
    first, second = run(tmp_path / "01.ipynb", good)
    assert not first.ok
    assert "cannot be read as a notebook" in first.what
    assert second.ok


@pytest.mark.parametrize("notebook", REAL, ids=lambda p: p.stem)
def test_every_notebook_is_thin_stripped_and_takes_a_profile(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 15
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in cells if c["cell_type"] == "code")
    assert check_notebook(notebook, {"profile": "default"})
    code = [c for c in cells if c["cell_type"] == "code"]
    first = "".join(code[0]["source"])
    assert "parameters" in code[0]["metadata"].get("tags", [])
    assert all(":" in line.split("=")[0] and "#" in line for line in first.splitlines() if line.strip()), (
        "annotated, commented"
    )
    for cell in code:
        for word in ("def ", "class ", "for ", "while "):
            assert not any(line.startswith(word) for line in "".join(cell["source"]).splitlines()), (
                f"logic in a notebook: {word}"
            )


# What happens when they run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_string_parameter_arrives_as_that_string(tmp_path: Path) -> None:
    values = {
        f"p{n}": text
        for n, text in enumerate(
            ["6130e59", "12e5", "0012", "1_000", "a{b}c", "ünï 'quoted\"", "None", "1.0", "true", ""]
        )
    }
    defaults = "\n".join(f'{name}: str = "default"' for name in values)
    checks = "\n".join(f"assert {name} == {text!r}, repr({name})" for name, text in values.items())
    notebook = write_notebook(tmp_path / "n.ipynb", checks, parameters=defaults)
    (executed,) = execute_all([notebook], values, "")
    assert executed.ok, executed.what


@pytest.mark.slow
def test_a_failing_cell_fails_its_notebook_alone_and_the_index_says_so(tmp_path: Path) -> None:
    notebooks = [
        write_notebook(tmp_path / "01_good.ipynb", "print('fine')"),
        write_notebook(
            tmp_path / "02_bad.ipynb", "print('before')", "raise ValueError('planted <b>')", "print('never')"
        ),
        write_notebook(tmp_path / "03_good.ipynb", "print('fine')"),
    ]
    outcome = build(tmp_path / "html", made_up.run([]), run_notebooks=True, notebooks=notebooks)
    assert not outcome.ok
    assert any("notebook 02_bad: a cell failed: ValueError: planted <b>" in line for line in outcome.failures)
    index = outcome.index.read_text(encoding="utf-8")
    assert "02_bad" in index
    assert "planted &lt;b&gt;" in index
    page = (outcome.index.parent / "notebooks" / "02_bad.html").read_text(encoding="utf-8")
    assert "This notebook failed" in page
    assert "before" in page
    for good in ("01_good", "03_good"):
        assert "fine" in (outcome.index.parent / "notebooks" / f"{good}.html").read_text(encoding="utf-8")
    assert [line for line in outcome.failures if "linter" in line] == []


@pytest.mark.slow
def test_native_death_is_a_failure_although_the_saved_notebook_says_completed(tmp_path: Path) -> None:
    crash = "import os\nos.write(2, b'GGML_ASSERT(planted) failed\\n')\nos.abort()"
    notebook = write_notebook(tmp_path / "01_crash.ipynb", "print('before')", crash, "print('never')")
    started = time.monotonic()
    (executed,) = run(notebook)
    assert not executed.ok
    assert "SIGABRT" in executed.what
    assert executed.path is not None
    saved = json.loads(executed.path.read_text(encoding="utf-8"))
    assert {c["metadata"]["papermill"]["status"] for c in saved["cells"] if "papermill" in c["metadata"]} == {
        "completed"
    }
    assert executed.cell is not None
    assert "os.abort" in "".join(saved["cells"][executed.cell]["source"])
    assert any("GGML_ASSERT(planted) failed" in line for line in executed.log_tail)
    assert time.monotonic() - started < 120
    assert not run(notebook)[0].ok, "a failed notebook is never taken from the shelf"


@pytest.mark.slow
def test_the_runner_itself_being_killed_is_a_failure(tmp_path: Path) -> None:
    notebook = write_notebook(
        tmp_path / "01.ipynb",
        f"import os, signal\nos.kill(os.getppid(), {signal.SIGKILL})\nimport time\ntime.sleep(30)",
    )
    (executed,) = run(notebook)
    assert not executed.ok
    assert "signal 9" in executed.what


@pytest.mark.slow
@pytest.mark.hard
def test_only_what_changed_runs_again(tmp_path: Path) -> None:
    one, two = (write_notebook(tmp_path / f"0{n}.ipynb", f"print({n})") for n in (1, 2))
    assert [e.reused for e in run(one, two)] == [False, False]
    assert [e.reused for e in run(one, two)] == [True, True]
    write_notebook(two, "print('edited')")
    assert [e.reused for e in run(one, two)] == [True, False]
    assert [e.reused for e in run(one, two, depends_on="other results")] == [False, False]


@pytest.mark.slow
@pytest.mark.hard
def test_an_executed_copy_that_was_changed_afterwards_is_not_believed(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "01.ipynb", "print('real')")
    (executed,) = run(notebook)
    assert executed.path is not None
    executed.path.write_text(executed.path.read_text(encoding="utf-8").replace("real", "fake"), encoding="utf-8")
    (again,) = run(notebook)
    assert not again.reused
    assert again.path is not None
    assert "fake" not in again.path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_another_kernel_name_in_the_notebook_does_not_matter(tmp_path: Path) -> None:
    assert run(write_notebook(tmp_path / "01.ipynb", "1", kernel="julia-1.9"))[0].ok


@pytest.mark.slow
@pytest.mark.hard
def test_notebooks_side_by_side_never_fight_over_ports(tmp_path: Path) -> None:
    notebooks = [write_notebook(tmp_path / f"{n:02}.ipynb", "print('fine')") for n in range(6)]
    assert [e.what for e in run(*notebooks)] == [""] * 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a{b}c", *(pytest.param(n, marks=pytest.mark.hard) for n in ("with space", "ünï"))])
def test_a_folder_with_an_odd_name_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / name / "home"))
    (executed,) = run(write_notebook(tmp_path / name / "01.ipynb", "import hiraishin"))
    assert executed.ok, executed.what


@pytest.mark.slow
def test_without_a_home_folder_notebooks_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir("/")
    (executed,) = run(write_notebook(tmp_path / "01.ipynb", "import hiraishin"))
    assert executed.ok, executed.what


@pytest.mark.slow
def test_an_interrupted_report_leaves_no_kernel_behind(tmp_path: Path) -> None:
    notebook = write_notebook(
        tmp_path / "01.ipynb",
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\nimport time\ntime.sleep(600)",
    )
    code = (
        "import signal, sys, pathlib; from hiraishin.report.execute import execute_all\n"
        # A job that was put in the background ignores SIGINT, and so do its children: Ctrl-C is tested, not the shell.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "execute_all([pathlib.Path(sys.argv[1])], {'profile': 'default'}, '')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(notebook)],
        env=os.environ | {"PYTHONPATH": str(paths.ROOT)},
        stderr=subprocess.DEVNULL,
    )
    pid = tmp_path / "pid"
    for _ in range(1200):
        if pid.exists() and pid.read_text(encoding="utf-8"):
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=30)
    finally:
        child.kill()
        child.wait()
    kernel = int(pid.read_text(encoding="utf-8"))
    for _ in range(300):
        if not _alive(kernel):
            return
        time.sleep(0.1)
    pytest.fail("the kernel is still there")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


# Pages -----------------------------------------------------------------------------------------------------------


def page_of(tmp_path: Path, *outputs: dict[str, object]) -> str:
    """The HTML pieces of a page whose one code cell has these outputs."""
    from hiraishin.report.pages import read_notebook

    notebook = json.loads(write_notebook(tmp_path / "n.ipynb", "1").read_text(encoding="utf-8"))
    notebook["cells"][-1]["outputs"] = list(outputs)
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    page = read_notebook(tmp_path / "n.ipynb", "A question", "n")
    return "".join(str(o) for c in page.cells for o in c.outputs)


def display(mime: str, content: str, **metadata: object) -> dict[str, object]:
    return {"output_type": "display_data", "data": {mime: content}, "metadata": metadata}


def test_printed_text_is_escaped_isolated_and_cut(tmp_path: Path) -> None:
    html = page_of(
        tmp_path,
        {"output_type": "stream", "name": "stdout", "text": "<script>x</script></pre>\x00\u202e" + "y" * 1_000_000},
    )
    assert "<script" not in html
    assert html.count("</pre>") == 1
    assert "<bdi>" in html
    assert "\x00" not in html
    assert "␀" in html
    assert len(html) < 60_000


def test_html_passes_an_allow_list(tmp_path: Path) -> None:
    hostile = (
        "<style>*{display:none}</style><table onclick=x><tr><td>kept</td></tr></table>"
        "<iframe src=//x></iframe><img src=x onerror=y>"
    )
    soup = BeautifulSoup(page_of(tmp_path, display("text/html", hostile)), "html.parser")
    assert {tag.name for tag in soup.find_all(True)} <= {"div", "table", "tbody", "tr", "td"}
    assert "kept" in soup.get_text()


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>x</script>",
        "<rect onload='x'/>",
        "<image href='http://x/y.png'/>",
        "<foreignObject/>",
        "<style>rect{fill:url(http://x)}</style>",
    ],
)
def test_a_picture_that_could_act_is_not_shown(tmp_path: Path, hostile: str) -> None:
    html = page_of(tmp_path, display("image/svg+xml", f"<svg xmlns='http://www.w3.org/2000/svg'>{hostile}</svg>"))
    assert "<img" not in html
    assert "is not shown" in html


def test_a_picture_keeps_the_alt_text_that_its_output_brings(tmp_path: Path) -> None:
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><rect/></svg>"
    assert 'alt="what it shows"' in page_of(
        tmp_path, display("image/svg+xml", svg, **{"image/svg+xml": {"alt": "what it shows"}})
    )


def test_a_data_frame_becomes_a_table_with_real_headers(tmp_path: Path) -> None:
    pandas_html = (
        "<table border='1'><thead><tr><th></th><th>a</th></tr></thead>"
        "<tbody><tr><th>0</th><td>1</td></tr></tbody></table>"
    )
    soup = BeautifulSoup(page_of(tmp_path, display("text/html", pandas_html)), "html.parser")
    assert [th.get("scope") for th in soup.find_all("th")] == ["col", "row"]
    assert all(th.get_text() for th in soup.find_all("th"))


def test_progress_bars_leave_no_trace(tmp_path: Path) -> None:
    bar: dict[str, object] = {"output_type": "stream", "name": "stderr", "text": "\r 10%|#   | 1/10\r100%|####| 10/10"}
    assert page_of(tmp_path, bar) == ""


def test_a_published_notebook_does_not_tell_where_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiraishin import paths
    from hiraishin.report.pages import without_places

    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("HIRAISHIN_HOME", '/data/a "place"')
    said = f'in {paths.ROOT}/patches, {paths.ROOT}; /data/a "place"/builds; /home/somebody/x; /mnt/home/somebody; {paths.ROOT}2/y'
    shown = f"in patches, .; $HIRAISHIN_HOME/builds; ~/x; /mnt/home/somebody; {paths.ROOT}2/y"
    assert without_places(said) == shown
    assert json.loads(without_places(json.dumps(said))) == shown
    monkeypatch.delenv("HIRAISHIN_HOME")
    assert without_places(f"[{paths.ROOT}/.hiraishin/builds]") == "[.hiraishin/builds]"
