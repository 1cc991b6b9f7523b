"""A profile or a prompt file with a mistake is named, with the place of the mistake."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiraishin.cli import parse_widths
from hiraishin.errors import UserError
from hiraishin.profile import list_profiles, load_profile
from hiraishin.prompts import Prompt, load_prompts, select


def _profile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_profile_that_ships_is_valid() -> None:
    for name in list_profiles():
        assert load_profile(name).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title = 'x'\nthread = 2\n", "thread"),
        ("title = 'x'\n[settings]\nthreads = 0\n", "settings.threads"),
        ("title = 'x'\n[settings]\nthreads = 'two'\n", "settings.threads"),
        ("title = 'x'\n[[replay]]\nwidths = [0]\n", "replay.0.widths.0"),
        ("title = 'x'\n[[replay]]\nwidths = [17]\n", "replay.0.widths.0"),
        ("title = 'x'\n[model]\nsource = 'file'\n", "path"),
        ("title = ", "not valid TOML"),
        ("", "title"),
    ],
)
def test_a_mistake_in_a_profile_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_profile(_profile(tmp_path, text))


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"default"):
        load_profile("defualt")


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (b'{"id": "a", "category": "c", "text": "t"}\n\xff\n', "line 2: not valid UTF-8"),
        (
            b'{"id": "a", "category": "c", "text": "t"}\n\n{"id": "a", "category": "c", "text": "u"}\n',
            "line 3: the id 'a'.*line 1",
        ),
        (b'{"id": "a", "category": "c"}\n', "line 1: needs exactly"),
        (b'{"id": "a", "category": "c", "text": "  "}\n', "line 1: text must be"),
        (b'{"id": 1, "category": "c", "text": "t"}\n', "line 1: id must be"),
        (b'{"id": "a", "category": "c", "text": "\\ud800"}\n', "line 1: text holds half"),
        (b"[1]\n", "line 1: needs exactly"),
        (b"{\n", "line 1: not valid JSON"),
        (b"\n \n", "empty"),
    ],
)
def test_a_mistake_in_a_prompt_file_is_named_with_its_line(tmp_path: Path, blob: bytes, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(blob)
    with pytest.raises(UserError, match=said):
        load_prompts(path)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_prompt_file_give_prompts_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, blob: bytes
) -> None:
    path = tmp_path_factory.mktemp("p") / "mine.jsonl"
    path.write_bytes(blob)
    with contextlib.suppress(UserError):
        assert all(isinstance(p, Prompt) for p in load_prompts(path))


@given(st.text(max_size=120))
def test_any_text_as_a_profile_gives_a_profile_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("p") / "mine.toml"
    try:
        path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        return
    with contextlib.suppress(UserError):
        load_profile(path)


def test_prompts_are_selected_by_id_first_all_and_category_limit() -> None:
    prompts = [Prompt("a", "x", "1"), Prompt("b", "x", "2"), Prompt("c", "y", "3")]
    assert [p.id for p in select(prompts, ["c", "a"])] == ["a", "c"]
    assert [p.id for p in select(prompts, ["first"])] == ["a"]
    assert [p.id for p in select(prompts, ["all"], limit_per_category=1)] == ["a", "c"]
    with pytest.raises(UserError, match="'z'"):
        select(prompts, ["z"])


def test_widths_are_read_as_numbers_and_ranges() -> None:
    assert parse_widths("2-4,9, 16") == [2, 3, 4, 9, 16]
    for wrong in ("0", "-1", "17", "4-2", "a", "", "2-", "2,,3", "1e1"):
        with pytest.raises(UserError):
            parse_widths(wrong)


def test_speculative_runs_can_leave_one_cause_out_like_replays_and_prices_do(tmp_path: Path) -> None:
    from types import SimpleNamespace
    from typing import cast

    from hiraishin.run import _run_tasks
    from hiraishin.tasks import PARTS, Context, RunTask

    file = tmp_path / "grid.toml"
    file.write_text(
        'title = "grid"\n[[runs]]\nname = "grid"\nprompts = ["lru-cache"]\narms = ["patched"]\nvariants = ["cuda-graphs"]\n',
        encoding="utf-8",
    )
    profile = load_profile(str(file))
    model = SimpleNamespace(inputs=lambda: {"model": "m"})
    context = SimpleNamespace(
        profile=profile,
        model=lambda quant: model,
        draft=lambda quant: model,
        build=lambda name: SimpleNamespace(fingerprint="f"),
    )
    arms = [cast(RunTask, task).arm for task in _run_tasks(cast(Context, context), profile.runs[0])]
    assert [arm.label for arm in arms] == ["patched", "patched-without-cuda-graphs"]
    assert [arm.parts_off for arm in arms] == [0, PARTS["cuda-graphs"]]
