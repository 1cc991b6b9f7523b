"""Hard use: kills at random moments of a run, after which the results equal those of a run nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from hard_runs import alive, contents, finish, make_home, start, wait_until, write_profile

pytestmark = [pytest.mark.hard, pytest.mark.real_model]

KILLS = 50


def test_fifty_kills_of_parent_or_child_leave_the_results_of_a_quiet_run(tmp_path: Path, tiny_model: Path) -> None:
    profile = write_profile(tmp_path / "kills.toml", tiny_model)
    quiet = make_home(tmp_path / "quiet")
    began = time.monotonic()
    finish(start(profile, quiet))
    whole = time.monotonic() - began
    chance = random.Random(20)
    disturbed = make_home(tmp_path / "disturbed")
    hits = 0
    while hits < KILLS:
        # Half of what is there goes, or later runs would find everything stored.
        for path in sorted((disturbed / "results").rglob("*.json"))[::2]:
            path.unlink()
        run = start(profile, disturbed)
        time.sleep(chance.uniform(0.1, whole))
        children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        victim = children[0].pid if hits % 2 and children else run.pid
        if run.poll() is None:
            os.kill(victim, signal.SIGKILL)
            hits += 1
        said, _ = run.communicate(timeout=120)
        assert "Traceback" not in said
        # Killed itself; or its child was: then it says so, unless the child had nothing left to do.
        assert run.returncode in ((-signal.SIGKILL,) if victim == run.pid else (0, 3)) or run.returncode == 0, said
        wait_until(lambda there=children: not any(map(alive, there)))
    finish(start(profile, disturbed))
    assert contents(disturbed / "results") == contents(quiet / "results")
