from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pandas as pd
import pytest
from speculative_fakes import FakeModel, FakeSession, matrix

from hiraishin.evaluate import Bench, evaluate_prompt
from hiraishin.intervals import binomial_interval, median_interval
from hiraishin.results import Result, ResultSet, Unit
from hiraishin.tally import forks_table, guard_table, outcome_table


def results(**changes: Any) -> ResultSet:
    """An evaluation of four prompts in two categories; the stock build's kernels add in another order."""
    found = []
    plan = matrix(
        **{"name": "evaluation", "drafters": [{"kind": "replayed", "acceptance": 0.8}], "draft_lengths": [6], **changes}
    )
    for build, noise in (("stock", 1.2), ("patched", 0.0)):
        for prompt in range(4):
            session = FakeSession(FakeModel(spread=1.2), noise=noise)
            for event in evaluate_prompt(
                Bench(session, session.switch, lambda _: FakeSession(FakeModel())), [prompt + 1, 5, 9, 2], plan
            ):
                inputs = {"build": build, "matrix": plan["name"], "prompt": f"p{prompt}", "category": "ab"[prompt % 2]}
                unit = Unit(event["kind"], inputs | event["params"])
                found.append(Result(unit, event["record"], pd.DataFrame(event["table"]), {}, unit.key))
    return ResultSet(None, {}, found)


def test_the_outcome_table_sums_up_what_the_runs_recorded() -> None:
    measured = results()
    table = outcome_table(measured)
    assert list(table.index.names) == ["matrix", "prefill", "drafter", "category", "build"]
    assert [(i[3], i[4]) for i in table.index] == [
        ("a", "stock"),
        ("a", "patched"),
        ("b", "stock"),
        ("b", "patched"),
        ("all", "stock"),
        ("all", "patched"),
    ]
    total = table.xs("all", level="category").droplevel(["matrix", "prefill", "drafter"])
    for build in ("stock", "patched"):
        runs = measured.of("speculative", build=build)
        row = total.loc[build]
        assert row["runs"] == row["prompts"] == 4
        assert row["identical"] == sum(r.record["identical"] for r in runs)
        assert row["prompts_forked"] == 4 - row["identical"]
        assert (row["share_low"], row["share_high"]) == binomial_interval(sum(r.record["identical"] for r in runs), 4)
        cycles = sum(r.record["cycles"] for r in runs)
        assert row["tokens_per_cycle"] == pytest.approx(sum(r.record["tokens"] - 1 for r in runs) / cycles)
        assert row["acceptance"] == pytest.approx(
            sum(r.record["accepted"] for r in runs) / sum(r.record["drafted"] for r in runs)
        )
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
    assert total.loc["patched"]["identical"] == 4 > total.loc["stock"]["identical"]


def test_the_forks_table_shows_both_texts_from_the_fork_on() -> None:
    measured = results()
    table = forks_table(measured)
    forked = [r for r in measured.of("speculative") if not r.record["identical"]]
    assert len(table) == len(forked) > 0
    assert set(table["build"]) == {"stock"}
    assert set(table["fork_kind"]) == {"rounding"}
    for row in table.to_dict("records"):
        assert row["plain"][:1] != row["speculative"][:1]
    assert forks_table(measured, build="patched").empty


def test_the_guard_table_pairs_runs_and_counts_shortened_passes() -> None:
    assert guard_table(results()).empty
    measured = results(tokens=300, client_guard=[False, True])
    table = guard_table(measured, build="patched")
    row = table.iloc[0]
    assert (len(table), row["runs"]) == (1, 4)
    guarded = measured.of("speculative", build="patched", client_guard=True)
    assert row["shortened"] == sum(r.record["guarded_cycles"] for r in guarded) > 0
    assert row["tokens_with"] == row["tokens_without"]
    assert row["tokens_per_cycle_with"] <= row["tokens_per_cycle_without"]


def test_tables_of_nothing_are_empty() -> None:
    nothing = ResultSet(None, {}, [])
    assert outcome_table(nothing).empty
    assert forks_table(nothing).empty
    assert guard_table(nothing).empty


def tail(successes: int, trials: int, p: Fraction) -> Fraction:
    """P(X >= successes), in exact arithmetic."""
    return sum(
        (math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1)), Fraction(0)
    )


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (1, 1), (8, 24), (37, 45), (45, 45), (0, 45), (208, 208), (1, 208)]
)
def test_the_binomial_interval_has_the_tails_it_promises(successes: int, trials: int) -> None:
    low, high = binomial_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    if successes > 0:
        assert float(tail(successes, trials, Fraction(low))) == pytest.approx(0.025, rel=1e-6)
    if successes < trials:
        assert float(1 - tail(successes + 1, trials, Fraction(high))) == pytest.approx(0.025, rel=1e-6)


def test_shares_that_cannot_be_are_refused() -> None:
    for successes, trials in ((1, 0), (2, 1), (-1, 3)):
        with pytest.raises(ValueError, match="is no share"):
            binomial_interval(successes, trials)


def test_the_median_interval_covers_with_the_promised_probability() -> None:
    for count in (6, 7, 20, 45):
        values = [float(v) for v in range(count)]
        interval = median_interval(values)
        assert interval is not None
        low, high = int(interval[0]), int(interval[1])
        assert high == count - 1 - low
        # The true median lies outside if at most `low` of the values are below it, or above it.
        outside = 2 * (1 - tail(low + 1, count, Fraction(1, 2)))
        narrower = 2 * (1 - tail(low + 2, count, Fraction(1, 2)))
        assert outside <= 0.05 < narrower
    assert median_interval([1.0] * 5) is None
