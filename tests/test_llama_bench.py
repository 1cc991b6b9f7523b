"""llama-bench beside our timing: the tool's call and its output, its failures, turns taken, stored once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiraishin import llama_bench
from hiraishin.errors import UserError
from hiraishin.llama_bench import bench_table, command, compare, find_tool, milliseconds
from hiraishin.models import ModelFile
from hiraishin.profile import Profile
from hiraishin.results import Store

SETTINGS = {"threads": 2, "flash_attn": True, "kv_type": "q8_0", "n_batch": 512, "gpu_layers": 7}


def printed(times: dict[int, list[int]]) -> str:
    return json.dumps([{"n_prompt": width, "n_depth": 200, "samples_ns": samples} for width, samples in times.items()])


def test_the_tool_is_asked_for_the_passes_that_we_time() -> None:
    words = command(Path("/b/llama-bench"), Path("/m.gguf"), SETTINGS, 200, [1, 8])
    told = dict(zip(words[1::2], words[2::2], strict=True))
    assert told["-p"] == "1,8" and told["-n"] == "0" and told["-d"] == "200" and told["-t"] == "2"
    assert told["-ctk"] == told["-ctv"] == "q8_0" and told["-fa"] == "1" and told["-ngl"] == "7" and told["-r"] == "1"


def test_its_nanoseconds_become_milliseconds_by_width_whatever_their_order() -> None:
    assert milliseconds(printed({8: [9_000_000], 1: [2_000_000, 4_000_000]}), [1, 8]) == [3.0, 9.0]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '[{"n_prompt": 1}]', printed({1: []}), printed({2: [1]})])
def test_output_of_another_kind_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="llama-bench printed something else"):
        milliseconds(text, [1])


class PlayedWorker:
    """Our timing, played: every pass takes 2 ms a token."""

    def __init__(self, build: Any) -> None:
        self.build = build

    def __enter__(self) -> PlayedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def result(self, function: str, **arguments: Any) -> Any:
        return {"ms": [2.0 * w for w in arguments["widths"]]} if function.endswith("time_round") else {}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Profile]:
    """A profile on a stock build in ``tmp_path``, whose tool is whatever a test puts there."""
    build = SimpleNamespace(name="stock", lib_dir=tmp_path, fingerprint="1" * 64)
    monkeypatch.setattr(llama_bench, "find_build", lambda *_: build)
    monkeypatch.setattr(llama_bench, "resolve", lambda *_, **__: ModelFile(tmp_path / "m.gguf", "m", "Q8_0", "0" * 64))
    monkeypatch.setattr(llama_bench, "Worker", PlayedWorker)
    yield Profile.model_validate({"title": "t"})


def put_tool(folder: Path, script: str) -> None:
    (folder / "llama-bench").write_text("#!/bin/sh\n" + script)
    (folder / "llama-bench").chmod(0o755)


def test_both_take_turns_the_first_round_is_warm_up_and_a_second_call_measures_nothing(
    profile: Profile, tmp_path: Path, store: Store
) -> None:
    answer = printed({1: [1_000_000], 4: [10_000_000]})
    put_tool(tmp_path, f"echo >> '{tmp_path}/calls'; [ \"$GGML_BATCH_INVARIANT\" ] && exit 9; echo '{answer}'")
    table = bench_table(profile, widths=(1, 4), store=store)
    assert list(table["llama-bench, ms"]) == [1.0, 10.0]
    assert list(table["all rows asked for, ms"]) == [2.0, 8.0]
    assert list(table["ratio"]) == [2.0, 0.8]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1 + llama_bench.ROUNDS
    (tmp_path / "calls").unlink()
    assert compare(profile, widths=(1, 4), store=store) is not None
    assert not (tmp_path / "calls").exists()


def test_settings_of_the_callers_shell_do_not_reach_the_tool(
    profile: Profile, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_BATCH_INVARIANT", "16")
    put_tool(tmp_path, f"[ \"$GGML_BATCH_INVARIANT\" ] && exit 9; echo '{printed({1: [1]})}'")
    assert compare(profile, widths=(1,), store=store) is not None


def test_a_tool_that_fails_is_one_line_with_its_last_words(profile: Profile, tmp_path: Path, store: Store) -> None:
    put_tool(tmp_path, "echo first >&2; echo 'error: failed to load model' >&2; exit 1")
    with pytest.raises(UserError, match="status 1: error: failed to load model"):
        compare(profile, widths=(1,), store=store)
    assert store.all("llama-bench") == []


def test_without_the_tool_the_notebook_says_which_command_makes_it(
    profile: Profile, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama-bench").mkdir()
    build: Any = SimpleNamespace(lib_dir=tmp_path)
    assert find_tool(build) is None
    assert bench_table(profile, store=store).empty
    assert "./build.sh stock --tools" in capsys.readouterr().out
