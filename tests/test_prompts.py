"""The prompt sets that ship with the project, and what is said about a set that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hiraishin import paths
from hiraishin.builds import find_build
from hiraishin.errors import UserError
from hiraishin.models import embedded
from hiraishin.profile import list_profiles, load_profile
from hiraishin.prompts import Prompt, load_prompts, select
from hiraishin.worker import Worker

COUNTS = {
    "code": 7,
    "mathematics": 6,
    "explanation": 7,
    "summary": 7,
    "structured": 6,
    "creative": 6,
    "long": 6,
}
REPLAY_IDS = ["lru-cache", "explain-tides", "packing-list", "long-rewrite"]
SETS = ["replay", "evaluation"]


@pytest.fixture(params=SETS)
def shipped(request: pytest.FixtureRequest) -> Path:
    return paths.prompts_dir() / f"{request.param}.jsonl"


def write(folder: Path, *lines: bytes) -> Path:
    path = folder / "mine.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def line(**changes: Any) -> bytes:
    return json.dumps({"id": "a", "category": "code", "text": "Write a loop."} | changes).encode()


# The shipped sets


def test_there_are_four_replay_prompts_in_a_fixed_order() -> None:
    assert [p.id for p in load_prompts("replay")] == REPLAY_IDS


def test_there_are_forty_five_evaluation_prompts_balanced_over_seven_categories() -> None:
    prompts = load_prompts("evaluation")
    assert len(prompts) == 45
    assert Counter(p.category for p in prompts) == COUNTS


def test_replay_prompts_use_the_categories_of_the_evaluation() -> None:
    assert {p.category for p in load_prompts("replay")} <= set(COUNTS)


def test_no_id_and_no_text_occurs_twice_in_both_sets_together() -> None:
    prompts = [p for name in SETS for p in load_prompts(name)]
    assert len({p.id for p in prompts}) == len(prompts) == 49
    assert len({p.sha256 for p in prompts}) == len(prompts)


def test_every_line_is_one_object_with_exactly_id_category_and_text_in_this_order(shipped: Path) -> None:
    for raw in shipped.read_text(encoding="utf-8").splitlines():
        assert list(json.loads(raw)) == ["id", "category", "text"]


def test_files_are_plain_ascii_with_one_final_newline(shipped: Path) -> None:
    blob = shipped.read_bytes()
    assert blob.isascii()
    assert blob.endswith(b"}\n")
    assert b"\r" not in blob


def test_texts_are_printable_ascii_and_line_breaks_without_space_around_them(shipped: Path) -> None:
    for prompt in load_prompts(shipped):
        assert all(c == "\n" or " " <= c <= "~" for c in prompt.text), prompt.id
        assert prompt.text == prompt.text.strip(), prompt.id
        assert not any(row.endswith(" ") for row in prompt.text.split("\n")), prompt.id


def test_ids_are_lower_case_words_with_dashes(shipped: Path) -> None:
    for prompt in load_prompts(shipped):
        words = prompt.id.split("-")
        assert all(word.isalnum() and word == word.lower() for word in words), prompt.id


def test_no_text_holds_a_marker_of_a_chat_template(shipped: Path) -> None:
    for prompt in load_prompts(shipped):
        assert not any(mark in prompt.text for mark in ("<|", "|>", "[INST]", "{{", "{%")), prompt.id


def test_four_code_prompts_ask_for_given_code_with_a_change() -> None:
    edits = [p for p in load_prompts("evaluation") if p.category == "code" and "```" in p.text]
    assert len(edits) == 4
    assert all(p.text.count("```") == 2 for p in edits)


def test_every_prompt_that_a_shipped_profile_names_exists() -> None:
    for name in list_profiles():
        profile = load_profile(name)
        named = [(m.prompt_set, m.prompts) for m in profile.replay] + [(m.prompt_set, m.prompts) for m in profile.runs]
        for prompt_set, wanted in named:
            assert select(load_prompts(prompt_set), wanted), name
        for watched in profile.localize:
            assert len(select(load_prompts(watched.prompt_set), [watched.prompt])) == 1, name


# Lengths in tokens of the target

LONG_INPUTS = {
    "long-minutes": 879,
    "long-log": 1053,
    "long-story": 1154,
    "long-manual": 1453,
    "long-article": 1724,
    "long-report": 2639,
}
"""Tokens of the embedded model, its chat template and default system message included."""

LONG_REWRITE = 229
TRACE = 320


@pytest.fixture(scope="module")
def rendered() -> dict[str, int]:
    """Length of every shipped prompt as the program feeds it, by id."""
    prompts = [p for name in SETS for p in load_prompts(name)]
    model = embedded("Q4_1", echo=lambda _: None)
    with Worker(find_build("stock")) as worker:
        reply = worker.result(
            "hiraishin.llama:tokenize_prompts", model_path=str(model.path), texts=[p.text for p in prompts]
        )
    return {p.id: len(tokens) for p, tokens in zip(prompts, reply["tokens"], strict=True)}


@pytest.mark.slow
@pytest.mark.real_model
def test_long_inputs_have_the_stated_lengths_and_the_longest_has_2639_tokens(rendered: dict[str, int]) -> None:
    long = {p.id: rendered[p.id] for p in load_prompts("evaluation") if p.category == "long"}
    assert long == LONG_INPUTS
    assert max(rendered.values()) == LONG_INPUTS["long-report"]


@pytest.mark.slow
@pytest.mark.real_model
def test_prompts_of_the_other_categories_are_short(rendered: dict[str, int]) -> None:
    others = [p for p in load_prompts("evaluation") if p.category != "long"]
    assert all(32 < rendered[p.id] < 256 for p in others)


@pytest.mark.slow
@pytest.mark.real_model
def test_the_answer_to_the_long_rewrite_passes_positions_256_384_and_512(rendered: dict[str, int]) -> None:
    length = rendered["long-rewrite"]
    assert length == LONG_REWRITE < 256
    assert length + TRACE > 512


def test_the_default_profile_traces_the_long_rewrite_as_far_as_the_lengths_here_assume() -> None:
    traced = [m.tokens for m in load_profile("default").replay if "long-rewrite" in m.prompts]
    assert traced == [TRACE]


# A set of one's own


def test_a_set_of_ones_own_is_read_from_a_path_with_its_text_unchanged(tmp_path: Path) -> None:
    text = 'Grüße\tan "alle" \\ 雷'
    path = write(tmp_path, line(text=text), b"", line(id="b", category="anything"))
    assert load_prompts(path) == [Prompt("a", "code", text), Prompt("b", "anything", "Write a loop.")]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (line(), "line 2: the id 'a' was used before, in line 1"),
        (b'{"id": "b", "category": "code", "text": "caf\xe9"}', "line 2: not valid UTF-8 (byte 45)"),
        (b'{"id": "b", "category": "code", "text": "x"', "line 2: not valid JSON"),
        (b'["b", "code", "x"]', "line 2: needs exactly the keys id, category and text"),
        (b'{"id": "b", "text": "x"}', "line 2: needs exactly the keys id, category and text"),
        (line(id="b", note="x"), "line 2: needs exactly the keys id, category and text"),
        (line(id="b", text=""), "line 2: text must be text that is not empty"),
        (line(id="b", text=" \n"), "line 2: text must be text that is not empty"),
        (line(id="", text="x"), "line 2: id must be text that is not empty"),
        (line(id=7), "line 2: id must be text that is not empty"),
        (rb'{"id": "b", "category": "code", "text": "\ud800"}', "line 2: text holds half a surrogate pair"),
        (b"[" * 100_000, "line 2: not valid JSON"),
    ],
    ids="same-id latin-1 cut-off list key-missing key-too-many empty blank no-id number surrogate deep".split(),
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, second: bytes, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_prompts(write(tmp_path, line(), second))
    assert caught.value.what.startswith("mine.jsonl, ")
    assert said in caught.value.what


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.jsonl is empty"):
        load_prompts(write(tmp_path, b""))


def test_an_unknown_set_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        load_prompts("evaluations")
    assert "'evaluations'" in caught.value.what
    assert "evaluation, replay" in caught.value.hint


def test_a_path_that_is_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts(f"{tmp_path}/")


# Choosing from a set


def test_selected_prompts_keep_the_order_of_the_set() -> None:
    prompts = load_prompts("replay")
    assert [p.id for p in select(prompts, ["long-rewrite", "lru-cache"])] == ["lru-cache", "long-rewrite"]
    assert [p.id for p in select(prompts, ["first", "packing-list"])] == ["lru-cache", "packing-list"]
    assert select(prompts, ["all"]) == prompts


def test_an_unknown_id_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        select(load_prompts("replay"), ["lru-cahce"])
    assert "'lru-cahce'" in caught.value.what
    assert "lru-cache" in caught.value.hint


def test_a_limit_for_each_category_takes_the_first_ones_of_each() -> None:
    prompts = load_prompts("evaluation")
    some = select(prompts, ["all"], limit_per_category=2)
    assert Counter(p.category for p in some) == dict.fromkeys(COUNTS, 2)
    for category in COUNTS:
        whole = [p for p in prompts if p.category == category]
        assert [p for p in some if p.category == category] == whole[:2]
