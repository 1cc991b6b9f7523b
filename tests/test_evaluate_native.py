"""The loop on the real model and the real builds: exact where it must be, and honest where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from speculative_fakes import matrix

from hiraishin.builds import find_build
from hiraishin.errors import UserError
from hiraishin.models import embedded
from hiraishin.prompts import load_prompts, select
from hiraishin.synthetic import SHAPES, make_shape
from hiraishin.worker import Worker

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SETTINGS = {"threads": 1, "flash_attn": True, "kv_type": "f16", "n_batch": 512}
LOOKUP, PERFECT, HALF = {"kind": "lookup"}, {"kind": "replayed"}, {"kind": "replayed", "acceptance": 0.5, "seed": 3}
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def target() -> Path:
    return embedded("Q4_K_M").path


@pytest.fixture(scope="module")
def patched() -> Iterator[Worker]:
    with Worker(find_build("patched")) as worker:
        yield worker


@pytest.fixture(scope="module")
def stock() -> Iterator[Worker]:
    with Worker(find_build("stock")) as worker:
        yield worker


def evaluate(worker: Worker, model: Path, prompt: list[int], draft: Path | None = None, **changes: Any) -> Events:
    """Events of ``measure``: switch on where there is one, ``draft`` as the model drafter's quant ``draft``."""
    plan = matrix(**{"tokens": 24, **changes})
    found = worker.call(
        "hiraishin.evaluate:measure",
        model_path=str(model),
        draft_model_paths={} if draft is None else {"draft": str(draft)},
        settings=SETTINGS,
        switch=16 if worker.build.name == "patched" else 0,
        parts_off=0,
        prompt={"id": "test", "tokens": prompt},
        matrix=plan,
    )
    return [e for e in found if "kind" in e]


def tokenize(worker: Worker, model: Path, wanted: str) -> list[int]:
    text = select(load_prompts("replay"), [wanted])[0].text
    reply = worker.result("hiraishin.llama:tokenize_prompts", model_path=str(model), texts=[text])
    return list(reply["tokens"][0])


def exact(events: Events) -> None:
    assert len(events) > 1
    for event in events:
        record = event["record"]
        assert record["identical"] is True, event["params"]
        if event["kind"] == "speculative":
            assert record["rows_compared"] == record["tokens"]
            assert record["rows_differing"] == 0, event["params"]


def test_patched_is_exact_bit_for_bit_and_stock_is_not(patched: Worker, stock: Worker, target: Path) -> None:
    tokens = tokenize(stock, target, "lru-cache")
    plan: dict[str, Any] = {"tokens": 48, "drafters": [LOOKUP, PERFECT, HALF], "draft_lengths": [3, 15]}
    ours, theirs = evaluate(patched, target, tokens, **plan), evaluate(stock, target, tokens, **plan)
    exact(ours)
    assert ours[0]["record"]["rows_sha256"] == theirs[0]["record"]["rows_sha256"]
    moved = [e["record"]["rows_differing"] for e in theirs[1:]]
    assert max(moved) > 0
    for event in theirs[1:]:
        if not event["record"]["identical"]:
            assert event["record"]["fork_kind"] == "rounding"
            assert event["record"]["control_diff"] == 0.0


def test_a_draft_model_on_the_patched_build_is_exact(patched: Worker, target: Path) -> None:
    tokens = tokenize(patched, target, "packing-list")
    drafters = [{"kind": "model", "quant": "draft", "margin": m} for m in (0, 3.0)]
    events = evaluate(patched, target, tokens, draft=embedded("Q4_1").path, drafters=drafters, draft_lengths=[4])
    exact(events)
    free, stopped = (e["record"] for e in events[1:])
    assert free["drafted"] > stopped["drafted"] > 0
    assert free["accepted"] > 0


def test_a_planted_wrong_accept_on_the_real_model_lies_where_no_measured_difference_explains_it(
    patched: Worker, stock: Worker, target: Path
) -> None:
    tokens = tokenize(stock, target, "lru-cache")
    for worker, switch in ((patched, 16), (stock, 0)):
        events = worker.call(
            "hiraishin.faults:wrong_accept",
            model_path=str(target),
            settings=SETTINGS,
            switch=switch,
            tokens=tokens,
            matrix=matrix(tokens=20, drafters=[HALF], draft_lengths=[3]),
            at=2,
        )
        records = [e["record"] for e in events if e.get("kind") == "speculative"]  # all read: the child is done
        record = records[0]
        assert record["identical"] is False
        assert record["fork_kind"] == "logic"
        assert record["gap_there"] > 2 * max(record["max_abs_diff"], record["row_diff"])


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257])
def test_prompt_lengths_around_256_and_of_one_token(patched: Worker, tiny_model: Path, length: int) -> None:
    tokens = [3 + (i * 7) % 250 for i in range(length)]
    plan: dict[str, Any] = {
        "drafters": [LOOKUP, PERFECT, HALF],
        "draft_lengths": [1, 15],
        "client_guard": [False, True],
    }
    exact(evaluate(patched, tiny_model, tokens, **plan))


@pytest.fixture
def shaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a tiny synthetic model, with changes to its shape."""
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "shapes"))

    def make(base: str, **changes: Any) -> Path:
        name = "-".join([base, *(f"{k}{v}" for k, v in changes.items())])
        monkeypatch.setitem(SHAPES, name, replace(SHAPES[base], **changes))
        return make_shape(name, echo=lambda _: None)

    return make


@pytest.mark.parametrize("length", [30, 63, 64])
def test_the_trained_context_is_used_up_to_its_end(patched: Worker, shaped: Callable[..., Path], length: int) -> None:
    model = shaped("tiny", context=64)
    tokens = [3 + (i * 7) % 250 for i in range(length)]
    events = evaluate(patched, model, tokens, tokens=100, drafters=[LOOKUP, PERFECT], draft_lengths=[1, 15])
    exact(events)
    for event in events:
        assert (event["record"]["tokens"], event["record"]["stopped"]) == (64 - length + 1, "context")
    with pytest.raises(UserError, match="a prompt of 65 tokens does not fit in a context of 64"):
        evaluate(patched, model, [5] * 65)


def test_a_recurrent_model_is_refused_by_name_before_it_decodes(patched: Worker, shaped: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"tiny-recurrent.*is a recurrent or hybrid model"):
        evaluate(patched, shaped("tiny-recurrent"), [5, 6, 7])


@pytest.mark.parametrize("base", ["tiny-moe", "tiny-swa"])
def test_experts_and_sliding_windows_are_exact_past_the_window(
    patched: Worker, shaped: Callable[..., Path], base: str
) -> None:
    tokens = [3 + (i * 7) % 250 for i in range(80)]
    exact(evaluate(patched, shaped(base), tokens, drafters=[LOOKUP, PERFECT, HALF], draft_lengths=[2, 15]))


def test_bad_input_is_one_line_and_the_child_lives_on(patched: Worker, target: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match="the prompt has no tokens"):
        evaluate(patched, target, [])
    with pytest.raises(UserError, match="a prompt of 9000 tokens does not fit"):
        evaluate(patched, target, [300] * 9000)
    drafters = [{"kind": "model", "quant": "draft"}]
    with pytest.raises(UserError, match="have vocabularies of"):
        evaluate(patched, target, [300, 301], draft=tiny_model, drafters=drafters)
    with pytest.raises(UserError, match="there is no draft model of quant draft"):
        evaluate(patched, target, [300, 301], drafters=drafters)
    with pytest.raises(UserError, match="there is no model file"):
        evaluate(patched, target, [300, 301], draft=Path("nowhere.gguf"), drafters=drafters)
    with pytest.raises(UserError, match="outside the vocabulary"):
        evaluate(patched, target, [300, 10**6])
    exact(evaluate(patched, tiny_model, [5, 6, 7], tokens=8, drafters=[PERFECT]))
