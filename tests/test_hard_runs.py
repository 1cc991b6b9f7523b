"""A run of the command line in odd places and among troubles: the results of a quiet run, or one line and nothing lost."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hard_runs import (
    alive,
    apart,
    can_mount,
    clone,
    command,
    contents,
    finish,
    make_home,
    manifests,
    start,
    variables,
    wait_until,
    write_profile,
)

from hiraishin import paths
from hiraishin.results import Store

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """The results of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    home = make_home(folder / "home")
    finish(start(write_profile(folder / "p.toml", tiny_model), home))
    found = contents(home / "results")
    assert len(found) == 2 * 3 * 7
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "home")


@pytest.fixture
def profile(tmp_path: Path, tiny_model: Path) -> Path:
    return write_profile(tmp_path / "p.toml", tiny_model)


# Stopped ---------------------------------------------------------------------------------------------------------


def _stop_and_go_on(
    folder: Path, home: Path, model: Path, press: Callable[[subprocess.Popen[str]], None], status: int
) -> None:
    profile = write_profile(folder / "p.toml", model, tokens=250, widths=range(1, 17), prompts=["lru-cache"])
    run = start(profile, home)
    wait_until(lambda: len(manifests(home)) > 2 or run.poll() is not None)
    children = psutil.Process(run.pid).children(recursive=True)
    assert children
    pressed = time.monotonic()
    press(run)
    said = finish(run, status)
    assert time.monotonic() - pressed < 5
    assert [child for child in children if alive(child)] == []
    lines = [line for line in said.splitlines() if line.startswith("hiraishin: ")]
    assert len(lines) == 1 and "Traceback" not in said, said
    found = re.search(
        r"stopped: (\d+) of 34 results of this run are stored in (.+)\. The same command goes on", lines[0]
    )
    assert found, said
    kept = manifests(home)
    assert abs(int(found[1]) - len(kept)) <= 1  # it may have been stored and not yet counted
    assert Path(found[2]) == home / "results"
    assert list((home / "logs").glob("native-*")) == []

    finish(start(profile, home))
    after = manifests(home)
    assert len(after) == 34
    assert {name: after[name] for name in kept} == kept, "something was measured twice"


def test_ctrl_c_says_what_was_kept_leaves_no_child_and_the_next_run_goes_on(
    tmp_path: Path, home: Path, tiny_model: Path
) -> None:
    # A terminal sends it to the whole group.
    _stop_and_go_on(tmp_path, home, tiny_model, lambda run: os.killpg(run.pid, signal.SIGINT), 128 + signal.SIGINT)


@pytest.mark.hard
def test_a_run_that_is_asked_to_end_does_what_it_does_after_ctrl_c(
    tmp_path: Path, home: Path, tiny_model: Path
) -> None:
    _stop_and_go_on(tmp_path, home, tiny_model, lambda run: run.terminate(), 128 + signal.SIGTERM)


# Places ----------------------------------------------------------------------------------------------------------


def test_closed_input_no_terminal_and_settings_of_other_programs_change_nothing(
    tmp_path: Path, home: Path, profile: Path, quiet: dict[str, Any]
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the working directory was taken for a module')")
    strange = {"LLAMA_CPP_LIB_PATH": "nowhere/", "GGML_CPU_TILED_MM": "0", "GGML_BATCH_INVARIANT": "16"}
    threads = {"OMP_NUM_THREADS": "64", "OMP_THREAD_LIMIT": "1", "OMP_DYNAMIC": "true"}
    done = subprocess.run(
        f"exec {shlex.join(command('run', profile))} 0<&-",
        shell=True,
        env=variables(home, HIRAISHIN_HOME=home.name, **strange, **threads),
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert contents(home / "results") == quiet
    assert b"\r" not in done.stdout + done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < 200


def test_a_clone_with_an_odd_name_behind_a_link_without_a_home_in_the_c_locale(
    tmp_path: Path, tiny_model: Path, quiet: dict[str, Any]
) -> None:
    odd = clone(tmp_path / "a{b}c" / "with space" / "ünï-雷")
    (tmp_path / "link").symlink_to(odd, target_is_directory=True)
    home = make_home(odd / ".hiraishin")
    (odd / "models").mkdir()
    model = odd / "models" / tiny_model.name
    model.write_bytes(tiny_model.read_bytes())
    profile = write_profile(odd / "mine ü.toml", model)
    done = subprocess.run(
        command("run", tmp_path / "link" / profile.name),
        env=variables(None, PYTHONPATH=str(tmp_path / "link"), HOME=None, LC_ALL="C", PYTHONUTF8="0"),
        cwd="/",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert contents(home / "results") == quiet
    assert "mine ü" in done.stdout.decode()


@pytest.mark.skipif(not can_mount("mount --bind /usr/bin /mnt"), reason="mounting is not allowed here")
def test_a_read_only_repository_and_home_folder_with_the_results_elsewhere(
    tmp_path: Path, home: Path, profile: Path, quiet: dict[str, Any]
) -> None:
    root = shlex.quote(str(paths.ROOT))
    (tmp_path / "user").mkdir()
    script = (
        f"mount --bind {root} {root}; mount -o remount,bind,ro {root}\n"
        'mount --bind "$HOME" "$HOME"; mount -o remount,bind,ro "$HOME"\n'
        f'if touch {root}/written || touch "$HOME"/written; then exit 99; fi\n'
        f"cd /; exec {shlex.join(command('run', profile))}"
    )
    done = apart(script, **variables(home, HOME=str(tmp_path / "user"), PYTHONDONTWRITEBYTECODE=None))
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(home / "results") == quiet


# Results ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not can_mount("mount -t tmpfs -o size=64k none /mnt"), reason="mounting is not allowed here")
def test_a_disk_that_fills_up_is_one_line_and_what_was_stored_is_kept(
    tmp_path: Path, home: Path, profile: Path, quiet: dict[str, Any]
) -> None:
    (home / "results").mkdir()
    script = (
        'mount -t tmpfs -o size=160k none "$HIRAISHIN_HOME/results"\n'
        f"set +e; {shlex.join(command('run', profile))}; status=$?; set -e\n"
        f'cp -a "$HIRAISHIN_HOME/results" {shlex.quote(str(tmp_path / "kept"))}; exit $status'
    )
    done = apart(script, **variables(home))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hiraishin: ")]
    assert len(lines) == 1 and "cannot store a result" in lines[0] and "No space left" in lines[0], done.stderr
    kept = contents(tmp_path / "kept")
    assert 0 < len(kept) < len(quiet)
    assert kept.items() <= quiet.items()
    assert list((tmp_path / "kept").rglob(".*")) == [], "something half-written is left"
    # With room again the same command goes on.
    (home / "results").rmdir()
    (tmp_path / "kept").rename(home / "results")
    before = manifests(home)
    finish(start(profile, home))
    after = manifests(home)
    assert {name: after[name] for name in before} == before
    assert contents(home / "results") == quiet


@pytest.mark.hard
def test_two_runs_at_once_share_one_results_folder(tmp_path: Path, home: Path, tiny_model: Path) -> None:
    profile = write_profile(tmp_path / "p.toml", tiny_model)
    for run in [start(profile, home), start(profile, home)]:
        finish(run)
    alone = make_home(tmp_path / "alone")
    finish(start(profile, alone))
    assert contents(home / "results") == contents(alone / "results")


# Processors ------------------------------------------------------------------------------------------------------


@pytest.mark.hard
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to take cores away")
def test_one_core_gives_the_bits_of_several(tmp_path: Path, home: Path, tiny_model: Path) -> None:
    profile = write_profile(tmp_path / "p.toml", tiny_model, threads=2, prompts=["lru-cache"])
    several = make_home(tmp_path / "several")
    finish(start(profile, several))
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(here)})
    try:
        run = start(profile, home)
    finally:
        os.sched_setaffinity(0, here)
    finish(run)
    assert contents(home / "results") == contents(several / "results")


@pytest.mark.hard
def test_64_threads_on_fewer_cores_end_and_the_patched_build_stays_exact(
    tmp_path: Path, home: Path, tiny_model: Path
) -> None:
    profile = write_profile(tmp_path / "p.toml", tiny_model, threads=64, tokens=8, widths=[1, 4], prompts=["lru-cache"])
    finish(start(profile, home))
    assert len(contents(home / "results")) == 2 * 3
    replays = Store(home / "results").all("replay")
    assert [r.record["rerun_differing"] for r in replays] == [0] * 4
    assert [r.record["differing"] for r in replays if r.inputs["build"] == "patched"] == [0] * 2
