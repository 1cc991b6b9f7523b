"""Measuring with bad input, a crash in the middle, damaged results and edited prompts: on real children, a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hard_runs import contents, write_profile

from hiraishin import memory, run, tasks
from hiraishin.builds import Build, find_build
from hiraishin.errors import UserError
from hiraishin.profile import Profile, load_profile
from hiraishin.prompts import Prompt
from hiraishin.results import ResultSet, Store
from hiraishin.worker import Worker

pytestmark = pytest.mark.real_model


def write_prompts(path: Path, texts: dict[str, str]) -> Path:
    lines = [json.dumps({"id": id, "category": "c", "text": text}) for id, text in texts.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def profile(tmp_path: Path, tiny_model: Path, home: Path) -> Profile:
    """Two prompts of one's own on both builds: a trace and two widths each, twelve units."""
    prompts = write_prompts(tmp_path / "mine.jsonl", {"one": "one text", "two": "another text"})
    path = write_profile(tmp_path / "p.toml", tiny_model, tokens=8, widths=[2, 4], prompts=["all"])
    path.write_text(path.read_text(encoding="utf-8") + f'prompt_set = "{prompts}"\n', encoding="utf-8")
    return load_profile(path)


def measure(profile: Profile, store: Store, said: list[str] | None = None) -> ResultSet:
    return run.measure(profile, store=store, quiet=True, echo=(said if said is not None else []).append)


def stored(store: Store) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in store.root.glob("*/*.json")}


def test_every_prompt_that_does_not_fit_is_named_before_anything_is_measured(
    tmp_path: Path, profile: Profile, store: Store
) -> None:
    texts = {"fits": "x", "long": "y" * 9000, "longer": "z" * 10_000}
    write_prompts(tmp_path / "mine.jsonl", texts)
    with pytest.raises(
        UserError, match=r"2 prompt\(s\).*context of 8192: long \(9001 tokens\), longer \(10001 tokens\)"
    ):
        measure(profile, store)
    assert stored(store) == {}


def test_a_model_that_does_not_fit_in_memory_is_refused_with_the_numbers_before_it_is_loaded(
    profile: Profile, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_available", lambda: (10**6, "the control group's limit"))
    with pytest.raises(
        UserError, match=r"needs 0\.1 GB of memory.*0\.0 GB are available \(the control group's limit\)"
    ):
        measure(profile, store)
    assert stored(store) == {}


def test_a_crash_in_one_measurement_leaves_the_others_and_only_it_is_tried_again(
    profile: Profile, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = tasks.ReplayTask.execute

    def crash(self: Any, context: Any, missing: Any) -> Iterator[Any]:
        if (self.arm.build, self.prompt.id) == ("stock", "one"):
            context.worker("stock").result("hiraishin.faults:native_abort", text="the planted assertion")
        yield from honest(self, context, missing)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.ReplayTask, "execute", crash)
        results = measure(profile, store)
    (failure,) = results.failures
    assert failure.startswith("replay one as given stock: ")
    assert "SIGABRT" in failure and "the planted assertion" in failure
    before = stored(store)
    assert len(before) == len(results.results) == 9
    again = measure(profile, store)
    assert again.failures == [] and len(again.results) == 12
    assert {name: stamp for name, stamp in stored(store).items() if name in before} == before


def test_damaged_results_and_those_of_an_older_schema_are_named_and_measured_again(
    profile: Profile, store: Store
) -> None:
    measure(profile, store)
    good, before = contents(store.root), stored(store)
    cut, older, table = sorted((store.root / "replay").glob("*.json"))[:3]
    cut.write_bytes(cut.read_bytes()[:-50])
    older.write_text(json.dumps({**json.loads(older.read_text()), "schema": 0}), encoding="utf-8")
    next(table.parent.glob(f"{table.stem}-*.parquet")).write_bytes(b"PAR1")
    said: list[str] = []
    measure(profile, store, said)
    assert sum(line.startswith("note: ") and line.endswith("it is measured again") for line in said) == 3
    assert contents(store.root) == good
    after = stored(store)
    assert {name for name in after if after[name] != before[name]} == {cut.name, older.name, table.name}


def test_an_edited_prompt_is_measured_again_and_the_others_are_not(
    tmp_path: Path, profile: Profile, store: Store
) -> None:
    first = measure(profile, store)
    before = stored(store)
    write_prompts(tmp_path / "mine.jsonl", {"one": "one text", "two": "an edited text"})
    second = measure(profile, store)
    new = set(stored(store)) - set(before)
    assert len(new) == 6
    assert {r.inputs["prompt"] for r in second.results if f"{r.key}.json" in new} == {"two"}
    assert [r.key for r in second.of("replay", prompt="one")] == [r.key for r in first.of("replay", prompt="one")]
    # Its name in the set is part of what a result says; its place in the file is not.
    write_prompts(tmp_path / "mine.jsonl", {"two": "an edited text", "one": "one text"})
    before = stored(store)
    measure(profile, store)
    assert stored(store) == before


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\u202e\u0007", "x" * 100_000])
def test_odd_prompts_are_measured_or_refused_in_one_line(
    tmp_path: Path, profile: Profile, store: Store, text: str
) -> None:
    write_prompts(tmp_path / "mine.jsonl", {"odd": text})
    try:
        results = measure(profile, store)
    except UserError as error:
        assert "\n" not in error.what
        return
    assert {Prompt("odd", "c", text).sha256} == {r.inputs["prompt_sha256"] for r in results.results}


def test_a_library_that_is_not_the_one_described_is_refused(tmp_path: Path, home: Path) -> None:
    build = find_build("stock")
    changed = tmp_path / "changed"
    shutil.copytree(build.lib_dir, changed, symlinks=True)
    library = (changed / "libggml-cpu.so").resolve()
    library.write_bytes(library.read_bytes() + b"\0")  # it loads and computes as before; nobody can tell
    with pytest.raises(UserError, match=r"the libggml-cpu\.so\S* that was loaded is not the one that \S+/changed was"):
        Worker(Build(build.name, build.backend, changed, build.description, build.abi)).close()
    with Worker(build) as worker:
        assert worker.libraries


def test_logs_of_last_week_are_swept_up_and_newer_ones_kept(home: Path) -> None:
    (home / "logs").mkdir()
    old, new = home / "logs" / "native-stock-old.log", home / "logs" / "native-stock-new.log"
    for path, days in ((old, 8), (new, 6)):
        path.touch()
        os.utime(path, (time.time() - days * 86400,) * 2)
    Worker(find_build("stock")).close()
    assert list((home / "logs").iterdir()) == [new]
