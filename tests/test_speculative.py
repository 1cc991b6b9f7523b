from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speculative_fakes import FakeModel, FakeSession

from hiraishin.drafters import LookupDrafter, ModelDrafter, ReplayedDrafter, drafter_name, make_drafter, top_two
from hiraishin.errors import UserError
from hiraishin.profile import Drafter as DrafterSpec
from hiraishin.speculative import (
    MAX_DRAFT,
    Drafter,
    Run,
    check_can_roll_back,
    generate,
    plain,
    room,
)

PROMPT = [5, 9, 2, 7, 5, 9, 2, 11, 3]


class Says:
    """A drafter that says what it is told, whatever came before."""

    name = "says"

    def __init__(self, *guesses: int) -> None:
        self.guesses = list(guesses)
        self.asked: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        return

    def propose(self, sequence: Sequence[int], most: int) -> list[int]:
        self.asked.append(most)
        return self.guesses[:most]


def plain_run(model: FakeModel, prompt: list[int], limit: int, **session: Any) -> Run:
    target = FakeSession(model, **session)
    return plain(target, target.prefill(prompt), limit=limit)


def speculative_run(
    model: FakeModel,
    prompt: list[int],
    drafter: Drafter,
    *,
    limit: int,
    draft_length: int = 8,
    client_guard: bool = False,
    **session: Any,
) -> tuple[Run, FakeSession]:
    target = FakeSession(model, **session)
    row = target.prefill(prompt)
    drafter.start(prompt)
    run = generate(target, drafter, prompt, row, limit=limit, draft_length=draft_length, client_guard=client_guard)
    return run, target


def drafters(model: FakeModel, trace: list[int], n_ctx: int = 512) -> list[Drafter]:
    worse = FakeModel(n_vocab=model.n_vocab, ends=tuple(model.ends), spread=model.spread, seed=1)
    specs = [
        {"kind": "model", "margin": 0},
        {"kind": "model", "margin": 3.0},
        {"kind": "lookup", "ngram": 1},
        {"kind": "lookup", "ngram": 3},
        {"kind": "replayed", "acceptance": 1.0},
        {"kind": "replayed", "acceptance": 0.6, "seed": 4},
        {"kind": "replayed", "acceptance": 0.0},
    ]
    full = [DrafterSpec.model_validate(s).model_dump() for s in specs]
    return [
        make_drafter(s, target=model, trace=trace, draft=lambda quant: FakeSession(worse, n_ctx=n_ctx)) for s in full
    ] + [ModelDrafter(FakeSession(model, n_ctx=n_ctx), model, name="itself", margin=0.0)]


@pytest.mark.parametrize("client_guard", [False, True])
@pytest.mark.parametrize("draft_length", [1, 2, 8, MAX_DRAFT])
def test_every_drafter_gives_the_plain_tokens_on_an_exact_model(draft_length: int, client_guard: bool) -> None:
    model = FakeModel()
    expected = plain_run(model, PROMPT, 60)
    for drafter in drafters(model, expected.tokens):
        run, target = speculative_run(
            model, PROMPT, drafter, limit=60, draft_length=draft_length, client_guard=client_guard
        )
        assert run.tokens == expected.tokens, drafter.name
        assert run.stopped == "limit"
        assert max(target.widths[1:]) <= draft_length + 1
        assert sum(len(c.emitted) for c in run.cycles) == len(run.tokens) - 1
        assert target.n_past == len(PROMPT) + len(run.tokens) - 1


def test_guesses_are_really_accepted_and_rejected() -> None:
    model = FakeModel()
    expected = plain_run(model, PROMPT, 60)
    shares = {}
    for drafter in drafters(model, expected.tokens):
        run, target = speculative_run(model, PROMPT, drafter, limit=60)
        shares[drafter.name] = (run.accepted, run.drafted, target.rollbacks)
    assert shares["itself"][0] == shares["itself"][1] > 40
    assert shares["replayed, acceptance 1, seed 0"][:2] == shares["itself"][:2]
    assert shares["replayed, acceptance 0, seed 0"][0] == 0 < shares["replayed, acceptance 0, seed 0"][1]
    for name in ("model Q2_K, no margin", "lookup, 1-grams", "lookup, 3-grams"):
        accepted, drafted, rollbacks = shares[name]
        assert 0 < accepted < drafted
        assert rollbacks > 0


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 23), min_size=1, max_size=20),
    limit=st.integers(1, 40),
    draft_length=st.integers(1, MAX_DRAFT),
    ends=st.sets(st.integers(0, 23), max_size=3),
    n_ctx=st.integers(20, 50),
    guard=st.booleans(),
    spread=st.floats(0.1, 4.0),
)
def test_any_prompt_limit_context_and_end_token_gives_the_plain_tokens(
    prompt: list[int], limit: int, draft_length: int, ends: set[int], n_ctx: int, guard: bool, spread: float
) -> None:
    model = FakeModel(n_vocab=24, ends=tuple(ends), spread=spread)
    expected = plain_run(model, prompt, limit, n_ctx=n_ctx)
    assert len(expected.tokens) <= limit
    for drafter in drafters(model, expected.tokens, n_ctx):
        run, _ = speculative_run(
            model, prompt, drafter, limit=limit, draft_length=draft_length, client_guard=guard, n_ctx=n_ctx
        )
        assert (run.tokens, run.stopped) == (expected.tokens, expected.stopped), drafter.name


def test_a_run_stops_at_an_end_token_even_when_it_was_guessed_with_more_behind_it() -> None:
    free = plain_run(FakeModel(), PROMPT, 60).tokens
    end = next(t for i, t in enumerate(free) if i > 5 and t not in free[:i])
    at = free.index(end)
    model = FakeModel(ends=[end])
    expected = plain_run(model, PROMPT, 60)
    assert expected.tokens == free[: at + 1]
    assert expected.stopped == "end"
    knows_all = ReplayedDrafter(free, name="all", acceptance=1.0, seed=0, n_vocab=64)
    run, target = speculative_run(model, PROMPT, knows_all, limit=60, draft_length=MAX_DRAFT)
    assert (run.tokens, run.stopped) == (expected.tokens, "end")
    assert run.cycles[-1].emitted[-1] == end
    assert target.n_past == len(PROMPT) + len(run.tokens) - 1


def test_an_end_token_first_ends_both_paths_before_any_pass() -> None:
    first = plain_run(FakeModel(), PROMPT, 1).tokens[0]
    model = FakeModel(ends=[first])
    assert plain_run(model, PROMPT, 20).tokens == [first]
    run, _ = speculative_run(model, PROMPT, Says(1, 2, 3), limit=20)
    assert (run.tokens, run.stopped, run.cycles) == ([first], "end", [])


def test_a_prompt_of_one_token_and_a_limit_of_one() -> None:
    model = FakeModel()
    assert (
        speculative_run(model, [4], LookupDrafter(name="l", ngram=3), limit=30)[0].tokens
        == plain_run(model, [4], 30).tokens
    )
    run, _ = speculative_run(model, [4], Says(1), limit=1)
    assert len(run.tokens) == 1
    assert run.cycles == []


@pytest.mark.parametrize("length", [250, 255, 256, 257])
def test_the_context_is_filled_to_its_last_cell_and_not_beyond(length: int) -> None:
    model = FakeModel()
    prompt = list(itertools.islice(itertools.cycle([1, 2, 3, 4, 5]), length))
    expected = plain_run(model, prompt, 400, n_ctx=272)
    assert len(expected.tokens) == 272 - length + 1
    assert expected.stopped == "context"
    for drafter in drafters(model, expected.tokens, 272):
        run, target = speculative_run(model, prompt, drafter, limit=400, n_ctx=272, draft_length=MAX_DRAFT)
        assert (run.tokens, run.stopped) == (expected.tokens, "context")
        assert target.n_past <= 272


def test_the_trained_context_counts_when_the_cache_is_longer() -> None:
    model = FakeModel(n_ctx_train=20)
    assert room(FakeSession(model, n_ctx=256), 9, 100) == 12
    assert len(plain_run(model, PROMPT, 100, n_ctx=256).tokens) == 12


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="a prompt of 21 tokens does not fit in a context of 20"):
        room(FakeSession(FakeModel(), n_ctx=20), 21, 5)
    with pytest.raises(UserError, match="0 tokens cannot be generated"):
        room(FakeSession(FakeModel()), 5, 0)


@pytest.mark.parametrize("length", [0, 16, -1])
def test_draft_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(UserError, match=f"a draft length of {length} is not possible"):
        speculative_run(FakeModel(), PROMPT, Says(1), limit=10, draft_length=length)


def test_the_client_guard_never_lets_a_pass_cross_256_and_changes_nothing_else() -> None:
    model = FakeModel()
    prompt = list(itertools.islice(itertools.cycle(PROMPT), 240))
    expected = plain_run(model, prompt, 60).tokens
    widths = {}
    for guard in (False, True):
        drafter = ReplayedDrafter(expected, name="all", acceptance=1.0, seed=0, n_vocab=64)
        run, _ = speculative_run(model, prompt, drafter, limit=60, draft_length=6, client_guard=guard)
        assert run.tokens == expected
        crossing = [c for c in run.cycles if c.n_past // 256 != (c.n_past + c.width - 1) // 256]
        assert bool(crossing) is not guard
        assert sum(c.guarded for c in run.cycles) == int(guard)
        widths[guard] = [c.width for c in run.cycles]
    assert len(widths[True]) >= len(widths[False])


def test_a_guarded_pass_at_the_boundary_drafts_nothing() -> None:
    prompt = list(itertools.islice(itertools.cycle(PROMPT), 255))
    says = Says(1, 2, 3)
    run, _ = speculative_run(FakeModel(), prompt, says, limit=10, client_guard=True)
    assert (run.cycles[0].n_past, run.cycles[0].width, run.cycles[0].guarded) == (255, 1, True)
    assert run.cycles[1].width > 1


def test_rejected_guesses_never_stay_in_the_cache() -> None:
    model = FakeModel()
    run, target = speculative_run(model, PROMPT, Says(60, 61, 62), limit=30)
    assert run.accepted == 0
    fresh = FakeSession(model)
    fresh.prefill([*PROMPT, *run.tokens[:-1]])
    assert target.states == fresh.states


def test_a_cache_that_says_it_cannot_forget_stops_the_run() -> None:
    with pytest.raises(UserError, match=r"fake.gguf cannot be rolled back"):
        speculative_run(FakeModel(), PROMPT, Says(60, 61), limit=30, rolls=False)


def test_models_that_cannot_roll_back_are_refused_by_name() -> None:
    recurrent = FakeModel(can_roll_back=False, name="mamba.gguf")
    session = FakeSession(recurrent)
    with pytest.raises(UserError, match=r"mamba.gguf is a recurrent or hybrid model"):
        check_can_roll_back(session)
    assert session.widths == []
    with pytest.raises(UserError, match=r"fake.gguf cannot be rolled back"):
        check_can_roll_back(FakeSession(FakeModel(), rolls=False))
    with pytest.raises(UserError, match=r"draft mamba.gguf"):
        ModelDrafter(session, FakeModel(), name="m", margin=0.0)
    sound = FakeSession(FakeModel())
    check_can_roll_back(sound)
    assert sound.n_past == 0


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"draft other.gguf and the target fake.gguf have vocabularies of 32 and 64"):
        ModelDrafter(FakeSession(FakeModel(n_vocab=32, name="other.gguf")), FakeModel(), name="m", margin=0.0)


def test_a_drafter_that_breaks_its_contract_is_a_bug_not_a_result() -> None:
    class Eager(Says):
        def propose(self, sequence: Sequence[int], most: int) -> list[int]:
            return [1] * (most + 1)

    with pytest.raises(ValueError, match="proposed"):
        speculative_run(FakeModel(), PROMPT, Eager(), limit=10)
    with pytest.raises(ValueError, match="proposed"):
        speculative_run(FakeModel(), PROMPT, Says(64), limit=10)
    with pytest.raises(ValueError, match="the cache holds 0 tokens"):
        generate(FakeSession(FakeModel()), Says(1), PROMPT, np.zeros(64, np.float32), limit=5, draft_length=2)


# Drafters ---------------------------------------------------------------------------------------------------------


def test_the_model_drafter_stays_in_step_with_the_output() -> None:
    model = FakeModel()
    expected = plain_run(model, PROMPT, 50).tokens
    session = FakeSession(FakeModel(seed=1))
    drafter = ModelDrafter(session, model, name="m", margin=0.0)
    drafter.start(PROMPT)
    sequence = [*PROMPT]
    for step in (1, 3, 1, 5, 2):  # as many tokens as a cycle may bring
        sequence += expected[len(sequence) - len(PROMPT) :][:step]
        guesses = drafter.propose(sequence, 4)
        fresh = ModelDrafter(FakeSession(FakeModel(seed=1)), model, name="f", margin=0.0)
        fresh.start(PROMPT)
        assert guesses == fresh.propose(sequence, 4)
        # All but the last guess have been fed.
        assert session.n_past == len(sequence) + 3


def test_the_model_drafter_keeps_what_was_accepted_in_its_cache() -> None:
    model = FakeModel()
    session = FakeSession(model)
    drafter = ModelDrafter(session, model, name="itself", margin=0.0)
    speculative_run(model, PROMPT, drafter, limit=41, draft_length=4)
    # Every guess was right: after each cycle only the last guess and the target's own token are new to the draft.
    assert session.widths[1:] == [1, 1, 1, 1, *[2, 1, 1, 1] * 7]


def test_the_model_drafter_returns_to_the_prompt_without_a_second_prefill() -> None:
    session = FakeSession(FakeModel())
    drafter = ModelDrafter(session, FakeModel(), name="m", margin=0.0)
    drafter.start(PROMPT)
    first = drafter.propose([*PROMPT, 1], 5)
    drafter.start(PROMPT)
    assert drafter.propose([*PROMPT, 1], 5) == first
    assert session.widths.count(len(PROMPT)) == 1
    drafter.start(PROMPT[:-1])
    assert session.n_past == len(PROMPT) - 1


def test_the_margin_stops_the_draft_where_it_is_unsure() -> None:
    model = FakeModel(spread=2.5)
    counts = []
    for margin in (0.0, 1.0, 3.0, 1e9):
        drafter = ModelDrafter(FakeSession(model), model, name="m", margin=margin)
        run, _ = speculative_run(model, PROMPT, drafter, limit=60)
        counts.append(run.drafted)
        session = FakeSession(model)
        session.prefill(PROMPT)
        row = session.decode([run.tokens[0]])[0]
        ahead = ModelDrafter(FakeSession(model), model, name="m", margin=margin)
        ahead.start(PROMPT)
        assert bool(ahead.propose([*PROMPT, run.tokens[0]], 1)) is (top_two(row)[1] >= margin)
    assert counts[0] > counts[1] > counts[2] > counts[3] == 0


def test_the_draft_stops_at_its_own_end_token() -> None:
    model = FakeModel()
    drafter = ModelDrafter(FakeSession(model), model, name="m", margin=0.0)
    drafter.start(PROMPT)
    guesses = drafter.propose([*PROMPT, 2], 12)
    at = next(i for i in range(1, 12) if guesses[i] not in guesses[:i])
    ending = FakeModel(ends=[guesses[at]])
    drafter = ModelDrafter(FakeSession(ending), ending, name="m", margin=0.0)
    drafter.start(PROMPT)
    assert drafter.propose([*PROMPT, 2], 12) == guesses[: at + 1]


def test_top_two_finds_the_pick_and_its_gap_and_leaves_the_row_as_it_was() -> None:
    row = np.array([1.0, 7.5, -3.0, 7.0], np.float32)
    before = row.copy()
    assert top_two(row) == (1, 0.5)
    assert row.tobytes() == before.tobytes()
    assert top_two(np.array([2.0, 2.0, 0.0], np.float32)) == (0, 0.0)


def test_lookup_copies_what_followed_the_latest_match() -> None:
    drafter = LookupDrafter(name="l", ngram=2)
    prompt = [1, 2, 3, 4, 5, 9, 2, 3, 8]
    drafter.start(prompt)
    assert drafter.propose([*prompt, 7, 2, 3], 4) == [8]
    drafter.start(prompt)
    assert drafter.propose([*prompt, 6, 2, 4], 4) == []


def test_lookup_guesses_one_token_for_every_two_that_match() -> None:
    drafter = LookupDrafter(name="l", ngram=2)
    prompt = list(range(1, 20))
    for matched in range(2, 10):
        drafter.start(prompt)
        assert drafter.propose([*prompt, 50, *prompt[9 - matched : 9]], 15) == prompt[9 : 9 + matched // 2]
    drafter.start(prompt)
    assert drafter.propose([*prompt, 50, *prompt[:9]], 3) == prompt[9:12]
    drafter.start(prompt)
    assert drafter.propose([*prompt, 5], 15) == []
    single = LookupDrafter(name="l", ngram=1)
    single.start([1, 2, 3])
    assert single.propose([1, 2, 3, 2], 15) == [3]


def test_lookup_goes_on_periodically_when_the_match_reaches_the_end() -> None:
    drafter = LookupDrafter(name="l", ngram=2)
    drafter.start([1, 2])
    assert drafter.propose([1, 2] * 6, 8) == [1, 2, 1, 2, 1]
    drafter.start([7])
    assert drafter.propose([7] * 9, 9) == [7] * 4


def test_lookup_knows_nothing_of_an_earlier_run() -> None:
    drafter = LookupDrafter(name="l", ngram=2)
    drafter.start([1, 2, 3])
    drafter.propose([1, 2, 3, 4, 5], 3)
    drafter.start([1, 2, 3])
    assert drafter.propose([1, 2, 3, 4], 3) == []
    assert drafter.propose([1, 2, 3, 4, 3, 4], 3) == [3]


def test_the_replayed_drafter_accepts_at_the_chosen_rate() -> None:
    trace = [int(t) for t in np.random.default_rng(0).integers(0, 64, 4000)]
    for length in (2, 8):
        drafter = ReplayedDrafter(trace, name="r", acceptance=0.773, seed=3, n_vocab=64)
        drafter.start(PROMPT)
        sequence = [*PROMPT, trace[0]]
        drafted = accepted = 0
        while len(sequence) - len(PROMPT) < len(trace) - length:
            guesses = drafter.propose(sequence, length)
            done = len(sequence) - len(PROMPT)
            right = [g == t for g, t in zip(guesses, trace[done:], strict=False)]
            assert all(right[:-1])
            drafted += len(guesses)
            accepted += sum(right)
            sequence += trace[done : done + sum(right) + 1]
        # Four standard deviations of a share over so many draws.
        assert abs(accepted / drafted - 0.773) < 4 * (0.773 * 0.227 / drafted) ** 0.5


def test_a_seed_gives_the_same_guesses_again_and_another_seed_others() -> None:
    trace = list(range(60))

    def guesses(seed: int) -> list[list[int]]:
        drafter = ReplayedDrafter(trace, name="r", acceptance=0.5, seed=seed, n_vocab=64)
        drafter.start([])
        return [drafter.propose(trace[:n], 8) for n in range(60)]

    assert guesses(1) == guesses(1) != guesses(2)


def test_names_leave_out_what_a_drafter_does_not_use() -> None:
    full = DrafterSpec().model_dump()
    assert drafter_name({**full, "quant": "Q8_0", "seed": 5}) == drafter_name(full) == "lookup, 3-grams"
    no = [drafter_name({**full, "kind": "model", "margin": m}) for m in (None, 0, 0.0)]
    assert set(no) == {"model Q2_K, no margin"}
    with pytest.raises(ValueError, match="no drafter 'telepathy'"):
        drafter_name({"kind": "telepathy"})
