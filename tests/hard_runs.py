"""Real runs of the command line on a tiny model, in a home of their own: started, disturbed and compared by the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hiraishin import paths
from hiraishin.results import Store

TIMED = {"seconds", "decode_seconds"}
PROMPTS = ("lru-cache", "explain-tides", "packing-list")

PROFILE = """
title = "a tiny run"
[model]
source = "file"
path = "{model}"
quant = "as given"
[settings]
threads = {threads}
[[replay]]
prompts = {prompts}
tokens = {tokens}
widths = {widths}
arms = ["stock", "patched"]
"""


def write_profile(
    path: Path,
    model: Path,
    *,
    tokens: int = 24,
    widths: Sequence[int] = (1, 2, 3, 4, 5, 8),
    prompts: Sequence[str] = PROMPTS,
    threads: int = 1,
) -> Path:
    """A profile with one replay matrix on both builds."""
    text = PROFILE.format(
        model=model, threads=threads, prompts=list(prompts), tokens=tokens, widths=list(widths)
    ).replace("'", '"')
    path.write_text(text, encoding="utf-8")
    return path


def make_home(folder: Path) -> Path:
    """A home without results that has the native builds of the real one."""
    folder.mkdir(parents=True)
    (folder / "builds").symlink_to(paths.home() / "builds", target_is_directory=True)
    return folder


def command(*arguments: object) -> list[str]:
    """``hiraishin`` with these arguments, as a command of its own."""
    return [sys.executable, "-P", "-m", "hiraishin", *map(str, arguments)]


def variables(home: Path | None, **changes: str | None) -> dict[str, str]:
    """The environment of a run; ``None`` takes a variable out."""
    wanted: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": str(paths.ROOT),
        "HIRAISHIN_HOME": None if home is None else str(home),
    }
    return {name: value for name, value in (wanted | changes).items() if value is not None}


_HEEDING = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def heeding_ctrl_c(arguments: Sequence[str]) -> list[str]:
    """The command, started so that it heeds Ctrl-C and the end of a session.

    A job in a shell's background ignores the one, whatever ``nohup`` started the other, and so do their children.
    """
    return [sys.executable, "-c", _HEEDING, *arguments]


def start(profile: Path, home: Path, **changes: str | None) -> subprocess.Popen[str]:
    """``hiraishin run PROFILE`` with a process group of its own, its output caught."""
    return subprocess.Popen(
        heeding_ctrl_c(command("run", profile)),
        env=variables(home, **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def finish(run: subprocess.Popen[str], expected: int = 0) -> str:
    """What a run said, once it has ended with the expected status."""
    said, _ = run.communicate(timeout=300)
    assert run.returncode == expected, said
    return said


def manifests(home: Path) -> dict[str, int]:
    """Every stored result, with the time it was written."""
    return {path.name: path.stat().st_mtime_ns for path in (home / "results").glob("*/*.json")}


def contents(results: Path) -> dict[str, Any]:
    """Every result of a store without its times, all of them sound."""
    store = Store(results)
    found = {}
    for result in store.all():
        record = {k: v for k, v in result.record.items() if k not in TIMED}
        found[result.key] = (result.kind, record, None if result.table is None else result.table.to_json())
    assert store.problems == []
    return found


def wait_until(what: Any, seconds: float = 120) -> None:
    """Poll until ``what()`` holds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def alive(process: psutil.Process) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def clone(folder: Path) -> Path:
    """A copy of what a run needs of this repository."""
    for name in ("hiraishin", "data/profiles", "data/prompts", "data/pins.toml"):
        source, target = paths.ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    return folder


def apart(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell script that may mount: in a user and mount namespace of its own."""
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", script],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def can_mount(script: str) -> bool:
    """Whether :func:`apart` can do this here."""
    try:
        return apart(script, **os.environ).returncode == 0
    except OSError:
        return False
