from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from speculative_fakes import FakeModel, FakeSession, Row, matrix

from hiraishin import forks
from hiraishin.drafters import make_drafter
from hiraishin.errors import UserError
from hiraishin.evaluate import Bench, cycle_table, evaluate_prompt, example_cycle, unit_name, unit_params
from hiraishin.forks import RowWatch, control_row, first_difference, fork_record, record_plain
from hiraishin.profile import RunMatrix, list_profiles, load_profile
from hiraishin.prompts import load_prompts, select
from hiraishin.results import Store, Unit
from hiraishin.speculative import Drafter, Run, generate

PROMPT = [5, 9, 2, 7, 5, 9, 2, 11, 3]
EVERY = [
    {"kind": "model", "margin": 0},
    {"kind": "model", "margin": 3.0},
    {"kind": "lookup"},
    {"kind": "replayed"},
    {"kind": "replayed", "acceptance": 0.6, "seed": 4},
]
TIMES = {
    "seconds",
    "tokens_per_second",
    "plain_tokens_per_second",
    "bookkeeping_share",
    "draft_ms",
    "verify_ms",
    "bookkeeping_ms",
    "pass_ms",
    "example",
}


def bench(model: FakeModel, draft: FakeModel | None = None, **session: Any) -> Bench:
    target = FakeSession(model, **session)
    worse = draft or FakeModel(n_vocab=model.n_vocab, ends=tuple(model.ends), spread=model.spread, seed=1)
    return Bench(target, target.switch, lambda quant: FakeSession(worse))


def events(
    model: FakeModel,
    prompt: list[int] = PROMPT,
    *,
    wanted: list[str] | None = None,
    noise: float = 0.0,
    forgetful: bool = True,
    **changes: Any,
) -> list[dict[str, Any]]:
    made = bench(model, noise=noise, forgetful=forgetful)
    return list(evaluate_prompt(made, prompt, matrix(**changes), wanted))


def planted(model: FakeModel, at: int, **session: Any) -> tuple[dict[str, Any], Run, RowWatch]:
    """A run that keeps one wrong guess: the first wrong one from the ``at``-th check on (0: none)."""
    target = FakeSession(model, **session)
    row = target.prefill(PROMPT)
    plain = record_plain(target, row, limit=40, prefill_s=0.0)
    target.rollback(len(PROMPT))
    seen: list[int] = []
    done: list[int] = []

    def survives(guess: int, pick: int) -> bool:
        seen.append(pick)
        if guess != pick and not done and 0 < at <= len(seen):
            done.append(len(seen))
            return True
        return guess == pick

    drafter: Drafter = make_drafter(
        {"kind": "replayed", "acceptance": 0.5, "seed": 2},
        target=model,
        trace=plain.run.tokens,
        draft=lambda quant: target,
    )
    drafter.start(PROMPT)
    watch = RowWatch(plain)
    run = generate(target, drafter, PROMPT, row, limit=40, draft_length=4, survives=survives, observe=watch)
    assert bool(done) is bool(at)
    return fork_record(target, run, watch, len(PROMPT)), run, watch


def test_on_an_exact_model_every_run_of_a_matrix_is_identical() -> None:
    found = events(FakeModel(), drafters=EVERY, draft_lengths=[1, 3, 15], client_guard=[False, True], repeats=2)
    assert len(found) == 1 + 5 * 3 * 2 * 2
    plain, *runs = found
    assert (plain["kind"], plain["params"]) == ("plain", {"tokens": 40, "prefill": "whole"})
    for run in runs:
        record = run["record"]
        assert run["kind"] == "speculative"
        assert record["identical"] is True
        assert record["token_ids"] == plain["record"]["token_ids"]
        assert record["text"] == plain["record"]["text"]
        assert record["rows_compared"] == record["tokens"] == 40
        assert record["rows_differing"] == 0 == record["max_abs_diff"]
        assert {record[k] for k in ("first_differing_token", "first_differing_byte", "fork_kind", "margin_there")} == {
            None
        }


def test_the_events_are_the_announced_units_in_the_announced_order() -> None:
    plan = matrix(drafters=EVERY, draft_lengths=[2, 4], prefill=["whole", "last-alone"], repeats=2)
    found = list(evaluate_prompt(bench(FakeModel()), PROMPT, plan))
    assert [(e["kind"], e["params"]) for e in found] == unit_params(plan)
    assert len({unit_name(e["kind"], e["params"]) for e in found}) == len(found) == 2 * (1 + 5 * 2 * 2)


def test_the_units_of_the_published_matrices_can_be_counted() -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15]
    runs = [u for u in unit_params(matrix(draft_lengths=lengths, drafters=EVERY[:2])) if u[0] == "speculative"]
    assert len(runs) * 4 * 2 == 208
    runs = [u for u in unit_params(matrix(draft_lengths=[1, 2, 4, 8, 12, 15])) if u[0] == "speculative"]
    assert len(runs) * 4 == 24


def test_only_the_wanted_units_are_measured_and_are_the_same_as_in_a_full_run() -> None:
    plan: dict[str, Any] = {"drafters": EVERY[:3], "draft_lengths": [2, 6], "prefill": ["whole", "last-alone"]}
    everything = {unit_name(e["kind"], e["params"]): e for e in events(FakeModel(), noise=0.3, **plan)}
    names = list(everything)[3::4]
    again = events(FakeModel(), noise=0.3, wanted=names, **plan)
    assert [unit_name(e["kind"], e["params"]) for e in again] == names
    for event in again:
        before = everything[unit_name(event["kind"], event["params"])]["record"]
        for key in set(before) - TIMES:
            assert event["record"][key] == before[key], key
    assert events(FakeModel(), wanted=[], **plan) == []


def test_kernels_of_another_order_make_forks_that_a_rerun_repeats_and_that_are_named_rounding() -> None:
    found = events(FakeModel(spread=1.2), noise=1.0, tokens=60, drafters=EVERY, draft_lengths=[2, 8], repeats=2)
    runs = [e for e in found if e["kind"] == "speculative"]
    forked = [e["record"] for e in runs if not e["record"]["identical"]]
    assert len(forked) >= 4
    for record in forked:
        assert record["fork_kind"] == "rounding"
        assert record["rows_differing"] > 0
        assert 0 < record["row_diff"] <= 1.01
        assert record["control_diff"] == 0.0
        assert 0 < record["margin_there"] <= record["gap_there"] <= 2 * record["row_diff"]
        assert record["fork_width"] > 1
        assert record["text"] != record["plain_text"]
        byte = record["first_differing_byte"]
        assert record["text"][:byte] == record["plain_text"][:byte]
        assert record["text"][byte : byte + 1] != record["plain_text"][byte : byte + 1]
        assert record["fork_kv_position"] == len(PROMPT) - 1 + record["first_differing_token"]
    by_unit: dict[str, set[tuple[int | None, int | None]]] = {}
    for run in runs:
        key = json.dumps({**run["params"], "repeat": 0}, sort_keys=True)
        place = (run["record"]["first_differing_token"], run["record"]["first_differing_byte"])
        by_unit.setdefault(key, set()).add(place)
    assert all(len(places) == 1 for places in by_unit.values())


@pytest.mark.parametrize("at", [1, 6, 12])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_planted_wrong_accept_is_found_and_told_apart_from_rounding(at: int, noise: float) -> None:
    model = FakeModel(spread=0.5)
    assert planted(model, 0, noise=noise)[0]["fork_kind"] is None  # nothing planted, nothing found
    record, run, watch = planted(model, at, noise=noise)
    assert record["fork_kind"] == "logic"
    assert watch.fork is not None
    assert watch.fork.token == first_difference(run.tokens, watch.plain.run.tokens)
    # It sits where no difference that was measured can explain it.
    assert watch.largest is not None
    assert record["gap_there"] > 2 * max(watch.largest, record["row_diff"])


def test_a_wrong_accept_of_a_near_tie_is_still_told_apart() -> None:
    """Where every margin is small the numbers alone would pass for rounding; the row's own argmax does not."""
    model = FakeModel(spread=0.5)
    record, _, watch = planted(model, 3, noise=0.05)
    assert watch.fork is not None
    assert record["fork_kind"] == "logic"
    inflated = forks.Fork(watch.fork.token, watch.fork.width, watch.fork.emitted, watch.fork.row, 1e9)
    assert forks.fork_kind(inflated, watch.fork.row) == "logic"


def test_a_cache_that_keeps_a_rejected_token_is_found_and_told_apart_from_rounding() -> None:
    """The control rolls back the same broken cache, so it must disagree with what the run saw or blame the row."""
    model = FakeModel(spread=2.5)
    target = FakeSession(model)
    row = target.prefill(PROMPT)
    plain = record_plain(target, row, limit=60, prefill_s=0.0)
    target.rollback(len(PROMPT))
    target.forgetful = False
    drafter = make_drafter(
        {"kind": "replayed", "acceptance": 0.5, "seed": 2}, target=model, trace=plain.run.tokens, draft=lambda q: target
    )
    drafter.start(PROMPT)
    watch = RowWatch(plain)
    run = generate(target, drafter, PROMPT, row, limit=60, draft_length=4, observe=watch)
    target.forgetful = True
    record = fork_record(target, run, watch, len(PROMPT))
    assert record["fork_kind"] == "logic"
    assert record["control_diff"] > 0


def test_the_control_repeats_a_runs_row_bit_for_bit_without_its_loop() -> None:
    model = FakeModel(spread=1.2)
    target = FakeSession(model, noise=2.0)
    row = target.prefill(PROMPT)
    plain = record_plain(target, row, limit=60, prefill_s=0.0)
    target.rollback(len(PROMPT))
    rows: dict[int, Row] = {}

    def keep(first: int, seen: Row, tokens: Sequence[int]) -> None:
        rows.update({first + i: seen[i].copy() for i in range(len(tokens))})

    spec = {"kind": "replayed", "acceptance": 0.7, "seed": 0}
    drafter = make_drafter(spec, target=model, trace=plain.run.tokens, draft=lambda q: target)
    drafter.start(PROMPT)
    run = generate(target, drafter, PROMPT, row, limit=60, draft_length=5, observe=keep)
    fork = first_difference(run.tokens, plain.run.tokens)
    assert fork is not None
    assert any(c.drafts and c.accepted < len(c.drafts) for c in run.cycles)
    for token in range(1, fork + 1):
        control = control_row(target, plain.run.tokens, run.cycles, len(PROMPT), token)
        assert control is not None
        assert control.tobytes() == rows[token].tobytes()
    assert control_row(target, plain.run.tokens, run.cycles, len(PROMPT), 0) is None


def test_a_difference_that_is_not_finite_is_never_called_rounding() -> None:
    fork = forks.Fork(3, 2, 1, np.array([0.0, np.nan, 1.0], np.float32), None)
    assert forks.fork_kind(fork, np.array([0.0, 2.0, 1.0], np.float32)) == "logic"


def test_one_output_that_ends_where_the_other_goes_on_is_a_fork() -> None:
    model = FakeModel()
    target = FakeSession(model)
    row = target.prefill(PROMPT)
    plain = record_plain(target, row, limit=10, prefill_s=0.0)
    watch = RowWatch(plain)
    record = fork_record(target, Run(plain.run.tokens[:6]), watch, len(PROMPT))
    assert record["fork_kind"] == "logic"
    assert first_difference(plain.run.tokens[:6], plain.run.tokens) == 6


def test_both_prefills_are_compared_with_the_plain_decode_after_a_whole_prefill() -> None:
    """Noise in passes wider than one makes a prefill of n - 1 and 1 tokens another prefill, as it does in reality."""
    found = events(
        FakeModel(spread=1.2, seed=3),
        noise=2.5,
        tokens=60,
        drafters=[{"kind": "replayed", "acceptance": 0.0}],
        draft_lengths=[1],
        prefill=["last-alone"],
    )
    kinds = [(e["kind"], e["params"]["prefill"]) for e in found]
    assert kinds == [("plain", "whole"), ("plain", "last-alone"), ("speculative", "last-alone")]
    whole, alone, run = (e["record"] for e in found)
    assert whole["identical"] is True
    assert alone["identical"] is (alone["token_ids"] == whole["token_ids"])
    assert run["identical"] is (run["token_ids"] == whole["token_ids"])
    assert run["identical_same_prefill"] is (run["token_ids"] == alone["token_ids"])
    assert alone["rows_sha256"] != whole["rows_sha256"]


def test_every_prefill_runs_with_the_switch_off_and_every_other_pass_with_it_on() -> None:
    made = bench(FakeModel())
    session = made.session
    assert isinstance(session, FakeSession)
    plan = matrix(drafters=EVERY, draft_lengths=[3], prefill=["whole", "last-alone"])
    for _ in evaluate_prompt(made, PROMPT, plan):
        pass
    prefills = [len(PROMPT), len(PROMPT) - 1, 1]
    off = [w for w, on in zip(session.widths, session.switches, strict=True) if not on]
    assert off == prefills


def test_the_prompt_is_prefilled_once_for_all_runs_of_a_prefill() -> None:
    made = bench(FakeModel())
    list(evaluate_prompt(made, PROMPT, matrix(drafters=EVERY[:3], draft_lengths=[1, 2, 3], repeats=2)))
    session = made.session
    assert isinstance(session, FakeSession)
    assert session.widths.count(len(PROMPT)) == 1


def test_the_plain_units_rows_hash_is_the_hash_of_all_rows() -> None:
    plain = events(FakeModel(), drafters=[{"kind": "lookup"}])[0]
    model, session = FakeModel(), FakeSession(FakeModel())
    row, hashes = session.prefill(PROMPT), []
    for token in plain["record"]["token_ids"]:
        assert int(row.argmax()) == token
        hashes.append(hashlib.sha256(row.tobytes()).hexdigest())
        row = session.decode([token])[0]
    assert plain["table"]["row_sha256"] == hashes
    assert plain["record"]["rows_sha256"] == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert (
        events(FakeModel(seed=9), drafters=[{"kind": "lookup"}])[0]["record"]["rows_sha256"]
        != plain["record"]["rows_sha256"]
    )
    assert model.n_vocab == 64


def test_numbers_of_a_run_agree_with_its_raw_log() -> None:
    for event in events(FakeModel(), drafters=EVERY, draft_lengths=[4], client_guard=[False, True]):
        if event["kind"] == "plain":
            continue
        record, table = event["record"], event["table"]
        assert len({len(column) for column in table.values()}) == 1
        assert record["cycles"] == len(table["cycle"])
        assert record["drafted"] == sum(table["drafted"]) == sum(w - 1 for w in table["width"])
        assert record["accepted"] == sum(table["accepted"])
        assert record["tokens"] - 1 == sum(len(e) for e in table["emitted"])
        assert [t for e in table["emitted"] for t in e] == record["token_ids"][1:]
        assert record["tokens_per_cycle"] == pytest.approx((record["tokens"] - 1) / record["cycles"])
        assert sum(record["widths"].values()) == record["cycles"]
        assert sum(int(w) * n for w, n in record["widths"].items()) == sum(table["width"])
        for part in ("draft", "verify", "bookkeeping"):
            assert record["seconds"][part] == pytest.approx(sum(table[f"{part}_ms"]) / 1e3)
        for n_past, width, first in zip(table["n_past"], table["width"], table["first_token"], strict=True):
            assert n_past == len(PROMPT) + first - 1
            assert width >= 1


def test_results_go_through_the_store_unchanged(store: Store) -> None:
    for event in events(FakeModel(spread=1.2), noise=1.0, drafters=EVERY, draft_lengths=[8]):
        unit = Unit(event["kind"], {"build": "fake", **event["params"]})
        put = store.put(unit, event["record"], event["table"])
        again = store.get(unit)
        assert again is not None
        assert again.record == put.record == event["record"]
        assert again.table is not None
        assert len(again.table) == len(next(iter(event["table"].values())))


def test_the_example_is_a_real_cycle_with_kept_and_rejected_guesses() -> None:
    event = events(FakeModel(), drafters=[{"kind": "replayed", "acceptance": 0.7}], draft_lengths=[6])[1]
    example, table = event["record"]["example"], event["table"]
    assert 0 < example["accepted"] < len(example["drafts"])
    where = table["n_past"].index(example["n_past"])
    assert table["drafts"][where] == example["draft_ids"]
    assert table["emitted"][where] == example["emitted_ids"]
    assert example["emitted_ids"][: example["accepted"]] == example["draft_ids"][: example["accepted"]]
    assert example["drafts"] == [f"<{t}>" for t in example["draft_ids"]]
    assert example_cycle(FakeSession(FakeModel()), Run([1])) is None
    assert all(column == [] for column in cycle_table([]).values())


def test_a_run_that_ends_with_its_first_token_has_no_speed() -> None:
    first = events(FakeModel(), tokens=1, drafters=[{"kind": "lookup"}])[0]["record"]["token_ids"][0]
    for event in events(FakeModel(ends=[first]), drafters=EVERY):
        record = event["record"]
        assert (record["tokens"], record["stopped"], record["text"]) == (1, "end", "")
        assert record["tokens_per_second"] is None
        assert record["identical"] is True


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257])
def test_prompt_lengths_around_256_and_of_one_token_are_identical(length: int) -> None:
    prompt = [(i * 5) % 11 for i in range(length)]
    for event in events(FakeModel(), prompt, drafters=EVERY, draft_lengths=[1, 15], client_guard=[False, True]):
        assert event["record"]["identical"], event["params"]
        assert event["record"]["prompt_tokens"] == length


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="the prompt has no tokens"):
        events(FakeModel(), [])
    with pytest.raises(UserError, match="a prompt of 600 tokens does not fit in a context of 512"):
        events(FakeModel(), [1] * 600)
    plan = matrix()
    for length in (0, 16):
        plan["draft_lengths"] = [length]
        with pytest.raises(UserError, match=f"a draft length of {length} is not possible"):
            list(evaluate_prompt(bench(FakeModel()), PROMPT, plan))
        with pytest.raises(ValueError, match="draft_lengths"):
            RunMatrix.model_validate({"name": "x", "draft_lengths": [length]})
    other = bench(FakeModel(), FakeModel(n_vocab=32, name="other.gguf"))
    with pytest.raises(UserError, match=r"the draft other\.gguf and the target fake\.gguf"):
        list(evaluate_prompt(other, PROMPT, matrix(drafters=EVERY[:1])))


def test_first_difference_of_texts() -> None:
    cases: list[tuple[bytes, bytes, int | None]] = [
        (b"", b"", None),
        (b"a", b"", 0),
        (b"abc", b"abd", 2),
        (b"ab", b"ab", None),
    ]
    find: Callable[[bytes, bytes], int | None] = first_difference
    assert [find(a, b) for a, b, _ in cases] == [want for _, _, want in cases]


@pytest.mark.parametrize("name", list_profiles())
def test_the_run_matrices_of_the_shipped_profiles_name_prompts_that_exist(name: str) -> None:
    for plan in load_profile(name).runs:
        prompts = select(load_prompts(plan.prompt_set), plan.prompts, limit_per_category=plan.limit_per_category)
        runs = [u for u in unit_params(plan.model_dump()) if u[0] == "speculative"]
        assert len({unit_name(*u) for u in runs}) == len(runs)
        assert bool(runs) is bool(plan.drafters)  # without a drafter a matrix is plain decoding
        expected = {"matrix24": 24, "matrix208": 208, "prefill24": 24}.get(plan.name)
        if expected is not None:
            assert len(prompts) * len(runs) * len(plan.quants or [""]) == expected * plan.repeats
        if plan.name == "evaluation":
            assert len(prompts) == 45
        if plan.name == "evaluation-model":
            assert len(prompts) == 15
