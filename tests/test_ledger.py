"""The ledger: every row is there, every verdict is computed, and it follows the results in both directions."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import figures_synthetic as synthetic
import pytest
import report_synthetic as made_up

from hiraishin import ledger, paths
from hiraishin.claims import claims
from hiraishin.ledger import DIFFERS, EXPLAINED, NOT_TESTABLE, REPRODUCED
from hiraishin.report.facts import Book, load_published
from hiraishin.results import Result, ResultSet

PUBLISHED = load_published()


def book(results: list[Result], **machine: Any) -> Book:
    result_set = ResultSet(made_up.profile(), {"cpu": "A CPU", "gpu": None} | machine, results)
    return Book("here", "A CPU", result_set.machine, tuple(claims(result_set)), result_set)


def verdicts(results: list[Result] | None, **machine: Any) -> dict[int, str]:
    books = [] if results is None else [book(results, **machine)]
    return {row.number: row.verdict for row in ledger.rows(books, PUBLISHED)}


# The rows --------------------------------------------------------------------------------------------------------


def test_all_rows_are_there_in_order() -> None:
    assert [row.number for row in ledger.rows([], PUBLISHED)] == list(range(1, 42))


def test_no_row_types_a_number_or_a_verdict() -> None:
    for row in tomllib.loads((paths.ROOT / "data" / "ledger.toml").read_text(encoding="utf-8"))["row"]:
        text = re.sub(r"\{[\w.]+\}|`[^`]*`|\bint8\b", "", row["claim"])
        assert not re.search(r"\d", text), row["number"]
        assert "verdict" not in row
        assert row["test"] in ledger.TESTS or row["test"] in ledger.ARITHMETIC, row["number"]
        assert row["rule"]


def test_every_test_belongs_to_a_row() -> None:
    named = {row["test"] for row in ledger.load_rows()}
    assert named == set(ledger.TESTS) | set(ledger.ARITHMETIC)


def test_every_published_number_of_the_post_is_used_by_its_row() -> None:
    rows = {row["number"]: row for row in ledger.load_rows()}
    for key, number in PUBLISHED.items():
        row = rows[number.row]
        assert key in row.get("published", []) or f"{{{key}}}" in row["claim"], key


def test_without_results_only_arithmetic_decides_and_every_other_row_says_what_it_takes() -> None:
    made = ledger.rows([], PUBLISHED)
    for row in made:
        if row.findings:
            assert all(not f.machine for f in row.findings)
        else:
            assert row.verdict == NOT_TESTABLE
            assert row.needs, row.number
    found = {row.number: row.verdict for row in made}
    assert [n for n, v in found.items() if v == EXPLAINED] == [10, 11, 12, 20, 22, 23, 24, 25, 33, 34]
    assert found[7] == REPRODUCED


# The verdicts ----------------------------------------------------------------------------------------------------


def test_a_run_that_shows_what_the_post_says_reproduces_it() -> None:
    found = verdicts(made_up.everything())
    for number in (1, 2, 3, 5, 8, 9, 28, 30, 31, 32, 35):
        assert found[number] == REPRODUCED, number


def test_a_run_that_shows_the_opposite_differs() -> None:
    found = verdicts(made_up.everything(exact_stock=True))
    for number in (1, 2, 3, 8, 9):
        assert found[number] == DIFFERS, number
    assert found[28] == REPRODUCED


def test_a_dear_second_token_differs_and_a_cheap_one_reproduces() -> None:
    def price(ratio: float) -> list[Result]:
        record = {
            "ratio": {"stock": {"1": 1.0, "2": ratio}},
            "spread": {"stock": {"1": 0.0, "2": 0.0}},
            "base": "stock",
            "median_ms": {"stock": {"1": 8.0, "2": 8.0 * ratio}},
        }
        table = {"build": ["stock"] * 6, "width": [1] * 3 + [2] * 3, "ms": [8.0] * 3 + [8.0 * ratio] * 3}
        return [synthetic.result("price", {"context": 200, "rounds": 3}, record, table)]

    assert verdicts(price(1.6))[4] == DIFFERS
    assert verdicts(price(1.02))[4] == REPRODUCED


def test_one_wrong_evaluation_prompt_is_enough() -> None:
    results = made_up.everything()
    wrong = next(
        r
        for r in results
        if r.kind == "speculative" and r.inputs["build"] == "patched" and r.inputs["matrix"] == "evaluation"
    )
    results[results.index(wrong)] = synthetic.result(
        "speculative", dict(wrong.inputs), {**wrong.record, "identical": False, "first_differing_byte": 3}, None
    )
    found = verdicts(results)
    assert found[30] == DIFFERS
    assert found[5] == DIFFERS


def test_one_moved_reference_row_is_enough() -> None:
    results = [r for r in made_up.everything() if r.kind != "trace"] + made_up.traces(moved=True)
    assert verdicts(results)[31] == DIFFERS


def test_plain_decodes_of_several_receipts_of_a_machine_are_counted_out_of_all_of_them() -> None:
    one = book(made_up.everything())
    plain = [claim for claim in one.claims if claim.id == "reference.plain_identical"]
    (row,) = (row for row in ledger.rows([replace(one, claims=(*one.claims, *plain))], PUBLISHED) if row.number == 31)
    assert row.verdict == REPRODUCED
    found = [re.match(r"of (\d+)", claim.detail) for claim in (*plain, *plain)]
    of = sum(int(match[1]) for match in found if match)
    assert f">{of}</data> of <data" in str(row.findings[0].text) and f">{of}</data> prompts" in str(
        row.findings[0].text
    )


def test_a_moved_fork_is_enough() -> None:
    results = made_up.everything()
    forked = next(
        r for r in results if r.kind == "speculative" and r.inputs["matrix"] == "matrix24" and not r.record["identical"]
    )
    results[results.index(forked)] = synthetic.result(
        "speculative", dict(forked.inputs), {**forked.record, "first_differing_byte": 1}, None
    )
    assert verdicts(results)[3] == DIFFERS


def without(parts: str, differing: int) -> Result:
    kv = list(range(200, 420))
    return synthetic.result(
        "replay",
        {
            "build": f"patched-without-{parts}",
            "prompt": "long-rewrite",
            "prompt_sha256": "l",
            "switch": 16,
            "width": 3,
            "gpu_layers": 99,
        },
        {
            "positions": 220,
            "differing": differing,
            "max_abs_diff": 0.3 if differing else 0.0,
            "flips": 0,
            "first_differing": 190 if differing else None,
            "first_differing_kv": 390 if differing else None,
            "rerun_differing": 0,
            "seconds": 1.0,
        },
        {"position": list(range(220)), "kv_position": kv, "differing": [i < differing for i in range(220)]},
    )


def test_padding_that_moves_logits_alone_goes_against_the_post() -> None:
    assert verdicts([without("guard", 9)])[21] == DIFFERS
    assert verdicts([without("guard", 0)])[21] == REPRODUCED


def test_gpu_rows_need_a_gpu() -> None:
    results = [without("cuda-parallel-blocks", 9)]
    assert verdicts(results)[19] == NOT_TESTABLE
    assert verdicts(results, gpu={"name": "A GPU"})[19] == REPRODUCED


def test_two_machines_that_disagree_are_both_shown() -> None:
    books = [book(made_up.everything()), Book("r", "A GPU", {}, *_exact())]
    row = next(r for r in ledger.rows(books, PUBLISHED) if r.number == 9)
    assert {f.machine: f.verdict for f in row.findings} == {"A CPU": REPRODUCED, "A GPU": DIFFERS}
    assert row.verdict == REPRODUCED
    assert row.also == (DIFFERS,)


def _exact() -> tuple[tuple[Any, ...], ResultSet]:
    results = ResultSet(None, {}, made_up.everything(exact_stock=True))
    return tuple(claims(results)), results


def test_results_that_cannot_be_read_never_become_a_verdict() -> None:
    broken = synthetic.result("replay", {"build": "stock", "width": 2, "prompt": "p"}, {})
    result_set = ResultSet(None, {}, [broken])
    (row,) = [r for r in ledger.rows([Book("here", "A CPU", {}, (), result_set)], PUBLISHED) if r.number == 8]
    assert row.verdict in (NOT_TESTABLE, DIFFERS)
    assert row.verdict != REPRODUCED


@pytest.mark.parametrize("results", [None, [], made_up.everything()])
def test_the_view_counts_every_row_once(results: list[Result] | None) -> None:
    books = [] if results is None else [book(results)]
    view = ledger.view(ledger.rows(books, PUBLISHED), {}, PUBLISHED)
    counted = [int(re.findall(r'value="(\d+)"', str(c["fact"]))[0]) for c in view["counts"]]
    assert sum(counted) == 41
