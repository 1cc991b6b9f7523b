"""Hard use: kills at random moments of a run, after which the results equal those of a run nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hiraishin import paths
from hiraishin.results import Store

pytestmark = [pytest.mark.hard, pytest.mark.real_model]

KILLS = 50
TIMED = {"seconds", "decode_seconds"}

PROFILE = """
title = "kills"
[model]
source = "file"
path = "{model}"
quant = "as given"
[settings]
threads = 1
[[replay]]
prompts = ["lru-cache", "explain-tides", "packing-list"]
tokens = 24
widths = [1, 2, 3, 4, 5, 8]
arms = ["stock", "patched"]
"""


def _start(profile: Path, home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hiraishin", "run", str(profile)],
        env={**os.environ, "HIRAISHIN_HOME": str(home), "PYTHONPATH": str(paths.ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _home(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    (made / "builds").symlink_to(paths.home() / "builds", target_is_directory=True)
    return made


def _contents(home: Path) -> dict[str, Any]:
    store = Store(home / "results")
    found = {}
    for result in store.all():
        record = {k: v for k, v in result.record.items() if k not in TIMED}
        rows = None if result.table is None else result.table.to_json()
        found[result.key] = (result.kind, record, rows)
    assert store.problems == []
    return found


def test_fifty_kills_of_parent_or_child_leave_the_results_of_a_quiet_run(tmp_path: Path, tiny_model: Path) -> None:
    profile = tmp_path / "kills.toml"
    profile.write_text(PROFILE.format(model=tiny_model), encoding="utf-8")
    quiet = _home(tmp_path, "quiet")
    began = time.monotonic()
    _, said = (run := _start(profile, quiet)).communicate()
    assert run.returncode == 0, said.decode()
    whole = time.monotonic() - began
    chance = random.Random(20)
    disturbed = _home(tmp_path, "disturbed")
    for number in range(KILLS):
        # Later runs find more stored and end sooner: every third kill starts from nothing again.
        if number % 3 == 0:
            for path in sorted((disturbed / "results").rglob("*.json"))[::2]:
                path.unlink()
        run = _start(profile, disturbed)
        time.sleep(chance.uniform(0.1, whole))
        victim = run.pid
        if number % 2 and run.poll() is None:
            children = psutil.Process(run.pid).children()
            victim = children[0].pid if children else run.pid
        if run.poll() is None:
            os.kill(victim, signal.SIGKILL)
        run.communicate()
    _, said = (run := _start(profile, disturbed)).communicate()
    assert run.returncode == 0, said.decode()
    assert _contents(disturbed) == _contents(quiet)
    assert not list((disturbed / "results").rglob(".*.partial"))
