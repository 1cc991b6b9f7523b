"""The command line itself: help at once, versions that matter, and exit statuses that are never mistaken for a verdict."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hard_runs import clone, command, heeding_ctrl_c, variables

from hiraishin import __version__, paths, progress
from hiraishin.cli import app
from hiraishin.errors import UserError
from hiraishin.profile import load_profile
from hiraishin.prompts import load_prompts
from hiraishin.terminal import printable

# What takes longer to import than a whole --help may take. (pydantic, 0.1 s, belongs to typer.)
HEAVY = (
    "numpy", "pandas", "pyarrow", "matplotlib", "llama_cpp", "gguf", "jinja2", "papermill", "nbconvert",
    "nbformat", "nbclient", "jupyter_client", "IPython", "ipywidgets", "huggingface_hub", "psutil", "pynvml", "rich",
)  # fmt: skip

EVERY_HELP = """
import json, sys
from hiraishin.cli import app
from hiraishin.errors import UserError
from hiraishin.profile import load_profile
from hiraishin.prompts import load_prompts
said = []
for verb in json.loads(sys.argv[1]):
    try:
        app([*verb, "--help"], standalone_mode=False)
    except SystemExit as end:
        assert not end.code
print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))
"""


def verbs() -> list[list[str]]:
    """Every verb there is, with the program itself first."""
    found: list[list[str]] = [[]] + [[c.name or c.callback.__name__] for c in app.registered_commands if c.callback]
    for group in app.registered_groups:
        assert group.name and group.typer_instance
        found.append([group.name])
        found += [[group.name, c.name] for c in group.typer_instance.registered_commands if c.name]
    return found


def test_every_help_comes_without_importing_anything_heavy() -> None:
    assert len(verbs()) > 10
    done = subprocess.run(
        [sys.executable, "-c", EVERY_HELP, json.dumps(verbs()), json.dumps(HEAVY)],
        env=variables(None),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(verbs())
    assert json.loads(done.stdout.splitlines()[-1]) == []


def _version(root: Path, **changes: str | None) -> str:
    done = subprocess.run(
        command("--version"),
        env=variables(None, PYTHONPATH=str(root), **changes),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_names_the_commit_and_the_packages_that_matter() -> None:
    said = _version(paths.ROOT)
    assert said.startswith(f"hiraishin {__version__}")
    for name in ("python", "llama-cpp-python", "numpy", "pyarrow"):
        assert re.search(rf"\b{name} \d+\.\d+", said), said
    if (paths.ROOT / ".git").exists() and shutil.which("git"):
        head = subprocess.run(
            ["git", "-C", str(paths.ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        assert f" at {head[:12]}" in said
        assert f" at {head[:12]}" in _version(paths.ROOT, GIT_DIR="/nowhere"), "a hook's settings are not ours"


def test_without_git_or_in_somebody_elses_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert " at " not in _version(paths.ROOT, PATH="/nowhere")
    git = shutil.which("git")
    if git is None:
        return
    copy = clone(tmp_path / "theirs" / "copy")
    theirs = [git, "-C", str(tmp_path / "theirs"), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*theirs, "init", "--quiet"], check=True)
    subprocess.run([*theirs, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    assert " at " not in _version(copy)


ENDS = """
import os, signal, sys
from hiraishin.errors import UserError
from hiraishin.cli import app
from hiraishin.errors import UserError
from hiraishin.profile import load_profile
from hiraishin.prompts import load_prompts
from hiraishin.terminal import run_app

@app.command()
def planted() -> None:
    {body}

sys.argv = ["hiraishin", *sys.argv[1:], "planted"]
run_app(app)
"""


def _ends(body: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        heeding_ctrl_c([sys.executable, "-c", ENDS.format(body=body), *options]),
        env=variables(None),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("raise UserError('no such thing', 'Do this.')", 2, "hiraishin: no such thing. Do this."),
        ("raise UserError('it failed', exit_code=3)", 3, "hiraishin: it failed"),
        ("raise OSError(28, 'No space left on device', '/x')", 2, "hiraishin: No space left on device: /x. What was"),
        ("open('/nowhere/x', 'w')", 2, "hiraishin: No such file or directory: /nowhere/x. What was"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "hiraishin: stopped: what was measured is stored in /"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "hiraishin: stopped: what was measured is stored in /"),
        ("os.kill(os.getpid(), signal.SIGHUP)", 129, "hiraishin: stopped: what was measured is stored in /"),
        (r"raise UserError('\x1b]0;gotcha\x07\x00\u202e')", 2, r"hiraishin: \x1b]0;gotcha\x07\x00\u202e"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_status_that_is_no_verdict(body: str, status: int, said: str) -> None:
    done = _ends(body)
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)


def test_debug_shows_where_it_happened_and_changes_no_status() -> None:
    done = _ends("raise UserError('it failed', exit_code=3)", "--debug")
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_a_bug_shows_its_traceback_and_is_no_verdict() -> None:
    done = _ends("[][1]")
    assert done.returncode == 70
    assert "IndexError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hiraishin: this is a bug")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "quick", "--out", "FILE/a/receipt"],
        ["run", "quick", "--out", "FILE/receipt"],
        ["report", "--profile", "quick", "--out", "FILE/html"],
        ["audit", "--markdown", "nowhere/issue.md"],
        ["audit", "--html", "FILE/page.html"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        command(*(a.replace("FILE", str(tmp_path / "file")) for a in arguments)),
        env=variables(tmp_path / "home"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("hiraishin: cannot write ")
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no endless file here")
def test_an_endless_file_as_profile_or_prompts_is_one_line() -> None:
    with pytest.raises(UserError, match=r"/dev/zero is larger than 1 MiB. That is no profile"):
        load_profile("/dev/zero")
    with pytest.raises(UserError, match="the prompt set zero is larger than 64 MiB"):
        load_prompts("/dev/zero")


def test_relative_paths_in_a_profile_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "cwd").mkdir()
    for name in ("beside/m.gguf", "beside/set.jsonl", "cwd/draft.gguf", "cwd/m.gguf"):
        (tmp_path / name).touch()
    text = """
    title = "t"
    model = { source = "file", path = "m.gguf" }
    draft = { source = "file", path = "draft.gguf" }
    replay = [{ prompt_set = "set.jsonl" }, { prompt_set = "evaluation" }]
    runs = [{ name = "r", prompt_set = "/nowhere/x.jsonl" }]
    """
    (tmp_path / "beside" / "p.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "cwd")
    profile = load_profile("../beside/p.toml")
    assert profile.draft is not None and profile.draft.path is not None and profile.model.path is not None
    sets = [*(m.prompt_set for m in profile.replay), *(m.prompt_set for m in profile.runs)]
    found = [profile.model.path, profile.draft.path, *sets]
    there = tmp_path / "beside"
    assert found == [
        str(there / "m.gguf"), str(tmp_path / "cwd" / "draft.gguf"), str(there / "set.jsonl"), "evaluation",
        "/nowhere/x.jsonl",
    ]  # fmt: skip


def test_a_missing_build_is_told_before_a_model_is_fetched(tmp_path: Path) -> None:
    done = subprocess.run(command("run", "quick"), env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "build is missing" in line and line.endswith("Make it with: ./build.sh stock")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [10, 10**7])
def test_a_reader_that_goes_away_is_no_error_message_and_no_verdict(size: int) -> None:
    there, here = os.pipe()
    os.close(there)
    with os.fdopen(here, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-c", ENDS.format(body=f"print('x' * {size})")],
            env=variables(None),
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
@pytest.mark.parametrize("size", [10, 10**7])
def test_output_to_a_full_disk_is_one_line_and_no_verdict(size: int) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", ENDS.format(body=f"print('x' * {size})")],
            env=variables(None),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode not in (0, 1)
    assert done.stderr.splitlines()[0].startswith("hiraishin: No space left on device. What was")


def test_printable_text_stays_as_it_is() -> None:
    assert printable("an ünï line\n  and another, 雷 ×") == "an ünï line\n  and another, 雷 ×"


def test_a_log_of_hours_has_less_than_200_lines_and_no_carriage_return(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("hiraishin.progress.time.monotonic", lambda: now[0])
    steps = 24 * 3600
    with progress.Progress("long", steps) as bar:
        for _ in range(steps):  # a day, a step a second
            now[0] += 1
            bar.step(1, "part")
    said = capsys.readouterr().err
    assert 20 < len(said.splitlines()) < 200
    assert "\r" not in said and "\x1b" not in said
    assert said.splitlines()[-1].startswith("long: 100 %")
    assert os.linesep == "\n"
