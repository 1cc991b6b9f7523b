"""The report: what it says for which results, and what it does when something is missing, damaged or wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import figures_synthetic as synthetic
import pytest
import report_synthetic as made_up
from bs4 import BeautifulSoup
from report_site import FEW, build, few_figures

from hiraishin.claims import Claim
from hiraishin.errors import UserError
from hiraishin.report.check import check_site
from hiraishin.report.facts import Book, Fact, format_number, load_constants, load_published, ratio
from hiraishin.results import ResultSet


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures unless a test asks for them, no receipts of the project's, a home of the test's own."""
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hiraishin.paths.receipts_dir", lambda: tmp_path / "no-receipts")
    few_figures(monkeypatch, ())


def text_of(page: Path) -> str:
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    main = soup.find("main")
    assert main is not None
    return " ".join(main.get_text(" ").split())


# What it says ----------------------------------------------------------------------------------------------------


def test_a_machine_where_stock_differs_gets_the_numbers_of_its_results(tmp_path: Path) -> None:
    outcome = build(tmp_path / "html", made_up.run())
    text = text_of(outcome.index)
    differing = sum(
        int(r.record["differing"]) for r in made_up.everything() if r.kind == "replay" and r.inputs["build"] == "stock"
    )
    assert f"{differing:,}".replace(",", " ") in text
    assert "The logits a token gets depend on its company" in text
    assert "cannot" not in text_of(outcome.index).split("The short version")[0]


def test_a_machine_where_stock_is_exact_gets_a_page_that_says_so(tmp_path: Path) -> None:
    outcome = build(tmp_path / "html", made_up.run(made_up.everything(exact_stock=True)))
    text = text_of(outcome.index)
    assert "Here a token keeps its logits in any company" in text
    assert "Nothing, for this model" in text
    for contradicted in (
        "depend on its company",
        "other bits than alone",
        "named another token",
        "left it somewhere",
        "come out with other",
    ):
        assert contradicted not in text


def test_patches_that_do_not_hold_are_called_that(tmp_path: Path) -> None:
    results = []
    for r in made_up.everything():
        if r.kind == "replay" and r.inputs["build"] == "patched" and r.inputs["width"] == 9:
            results.append(
                synthetic.result(
                    "replay",
                    dict(r.inputs),
                    {**r.record, "differing": 3, "first_differing_kv": 61, "max_abs_diff": 0.5},
                    None,
                )
            )
        else:
            results.append(r)
    text = text_of(build(tmp_path / "html", made_up.run(results)).index)
    assert "the fix is not complete" in text
    assert "What is left" in text
    assert "rows has the bits it gets alone" not in text


def test_a_reference_that_moved_is_said_and_the_proof_withdrawn(tmp_path: Path) -> None:
    parts = [r for r in made_up.everything() if r.kind != "trace"] + made_up.traces(moved=True)
    text = text_of(build(tmp_path / "html", made_up.run(parts)).index)
    assert "the lone token itself has not moved" not in text


def test_controls_that_are_not_clean_come_before_every_conclusion(tmp_path: Path) -> None:
    parts = []
    for r in made_up.everything():
        if r.kind == "replay" and r.inputs["width"] == 1:
            parts.append(
                synthetic.result("replay", dict(r.inputs), {**r.record, "differing": 2, "first_differing_kv": 61}, None)
            )
        else:
            parts.append(r)
    text = text_of(build(tmp_path / "html", made_up.run(parts)).index)
    assert "The controls are not clean" in text
    assert "Two controls come before any conclusion" not in text


def test_the_fork_is_shown_with_both_continuations_and_hostile_text_escaped(tmp_path: Path) -> None:
    outcome = build(tmp_path / "html", made_up.run())
    html = outcome.index.read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>" not in html
    assert "\x00" not in html
    fork = BeautifulSoup(html, "html.parser").select_one(".fork")
    assert fork is not None
    assert len(fork.find_all("mark")) == 2
    assert all(p.find("bdi") for p in fork.find_all("p"))


def test_a_gpu_receipt_becomes_a_chapter_and_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_figures(monkeypatch, ())
    made_up.one_receipt(tmp_path / "receipts", monkeypatch)
    outcome = build(tmp_path / "html", made_up.run())
    assert "A Test GPU" in text_of(outcome.index)
    assert "A Test GPU" in text_of(outcome.index.parent / "receipts.html")
    assert (outcome.index.parent / "data" / "claims-made-up-gpu.json.gz").is_file()
    assert outcome.failures == []


def test_a_damaged_receipt_is_named_and_the_rest_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up.one_receipt(tmp_path / "receipts", monkeypatch)
    units = tmp_path / "receipts" / "made-up-gpu" / "units.jsonl"
    units.write_text(units.read_text(encoding="utf-8").replace('"flips":', '"flips":1', 1), encoding="utf-8")
    outcome = build(tmp_path / "html", made_up.run())
    assert not outcome.ok
    assert any("made-up-gpu" in line for line in outcome.failures)
    assert "made-up-gpu" in text_of(outcome.index)


# What it does when something is missing --------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, "empty"])
def test_an_empty_result_set_is_named_and_the_page_still_built(tmp_path: Path, nothing: str | None) -> None:
    outcome = build(tmp_path / "html", None if nothing is None else made_up.run([]))
    text = text_of(outcome.index)
    assert not outcome.ok
    assert "nothing has been measured" in text
    assert "Not measured in this run" in text
    assert "replay.first_differing_width" in outcome.missing
    assert not any("linter" in line for line in outcome.failures)


def test_a_kind_that_was_not_measured_is_named_in_its_place(tmp_path: Path) -> None:
    outcome = build(tmp_path / "html", made_up.run([r for r in made_up.everything() if r.kind != "price"]))
    assert outcome.ok
    assert "price.ratio" in outcome.missing
    assert "Not measured in this run: pass times by width" in text_of(outcome.index)


def test_missing_units_make_the_report_incomplete(tmp_path: Path) -> None:
    results = made_up.run()
    results.missing.append(results.results[0].unit)
    outcome = build(tmp_path / "html", results)
    assert any("1 measurement" in line for line in outcome.failures)


def test_one_nan_is_named_and_the_rest_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_figures(monkeypatch, FEW)
    results = made_up.run()
    table = next(r.table for r in results.results if r.kind == "replay" and r.table is not None)
    table.loc[3, "max_abs_diff"] = math.nan
    outcome = build(tmp_path / "html", results)
    assert (outcome.index.parent / "figures" / "float-order.light.svg").is_file()
    assert "replay-map is not here" in text_of(outcome.index)


def test_a_figure_with_a_bug_fails_the_report_but_not_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_figures(monkeypatch, ("float-order",))
    from hiraishin.figures import float_order

    def broken(data: object) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(float_order, "caption", broken)
    outcome = build(tmp_path / "html", made_up.run())
    assert "figure float-order: ZeroDivisionError: planted" in outcome.failures
    assert "planted" in text_of(outcome.index)


def test_two_figures_of_one_id_are_named_and_the_rest_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiraishin import figures

    def twice() -> dict[str, object]:
        raise UserError("two figures are called 'price': a and b", "Rename one of them.")

    monkeypatch.setattr(figures, "registry", twice)
    outcome = build(tmp_path / "html", made_up.run())
    assert any("two figures are called" in line for line in outcome.failures)
    assert "two figures are called" in text_of(outcome.index)


def test_a_folder_that_is_no_report_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(UserError, match="is no report"):
        build(tmp_path / "html", made_up.run())
    assert (tmp_path / "html" / "thesis.txt").is_file()


def test_a_report_that_breaks_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "html", made_up.run())
    before = (tmp_path / "html" / "index.html").read_bytes()

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hiraishin.report.article.Writer.receipts", broken)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "html", made_up.run([]))
    assert (tmp_path / "html" / "index.html").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".html")] == []


@pytest.mark.parametrize("name", ["a{b}c", "with space", "ünï", "100%"])
def test_any_folder_name_will_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    outcome = build(tmp_path / name / "html", made_up.run())
    assert outcome.ok
    assert check_site(outcome.index.parent) == []


def test_the_marker_is_written_and_says_what_failed(tmp_path: Path) -> None:
    outcome = build(tmp_path / "html", None)
    marker = json.loads((outcome.index.parent / "report.json").read_text(encoding="utf-8"))
    assert marker["ok"] is False
    assert marker["failures"] == outcome.failures


def test_a_second_report_of_the_same_results_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_figures(monkeypatch, ("float-order",))
    sites = []
    for name in ("one", "two"):
        outcome = build(tmp_path / name, made_up.run())
        sites.append(
            {
                p.relative_to(outcome.index.parent): p.read_bytes()
                for p in outcome.index.parent.rglob("*")
                if p.is_file()
            }
        )
    assert sites[0] == sites[1]


# Numbers ---------------------------------------------------------------------------------------------------------


def test_a_report_is_made_again_only_if_something_that_it_is_made_from_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_figures(monkeypatch, ("float-order",))
    said: list[str] = []
    same = "nothing that the report is made from has changed"

    def again(results: ResultSet) -> list[str]:
        said.clear()
        outcome = build(tmp_path / "html", results, echo=said.append)
        assert outcome.ok and check_site(outcome.index.parent) == []
        return said

    assert same not in again(made_up.run())
    assert again(made_up.run()) == [same]
    (tmp_path / "html" / "data.html").unlink()
    assert same not in again(made_up.run())
    results = made_up.run()
    first = results.results[0]
    results.results[0] = replace(first, record={**first.record, "text": "measured again"})
    assert same not in again(results)


def book(*claims: Claim) -> Book:
    return Book("here", "a machine", {}, claims)


def test_several_claims_become_one_number_only_when_it_is_said_how() -> None:
    b = book(
        Claim("x", "stock", {"quant": "F16"}, 2),
        Claim("x", "stock", {"quant": "Q6_K"}, 8),
        Claim("x", "patched", {}, None),
    )
    assert b.value("x", "stock", "min") == 2
    assert b.value("x", "stock", "sum") == 10
    assert b.value("x", "stock", quant="Q6_K") == 8
    assert b.value("x", "patched") is None
    assert b.has("x", "patched")
    with pytest.raises(LookupError):
        b.value("x", "stock")


def test_a_missing_claim_is_visible_and_remembered() -> None:
    b = book()
    assert "not measured" in str(b.claim("no.such"))
    assert b.missing == ["no.such"]


def test_a_number_names_its_claim_build_and_parameters() -> None:
    fact = book(Claim("price.ratio", "stock", {"width": 9}, 2.25, "x", "median")).fact("price.ratio", "stock")
    assert fact is not None
    html = str(fact.times())
    for piece in ('data-claim="price.ratio"', 'data-build="stock"', 'value="2.25"', '"width":9', ">2.25×<"):
        assert piece in html


def test_a_ratio_keeps_both_claims_and_refuses_zero() -> None:
    top, bottom = Fact(3, "", (Claim("a", "stock"),)), Fact(2, "", (Claim("b", "stock"),))
    made = ratio(top, bottom)
    assert made is not None
    assert made.value == 1.5
    assert {c.id for c in made.claims} == {"a", "b"}
    assert ratio(top, Fact(0, "", (Claim("b", "stock"),))) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, "0"),
        (12345, "12\u202f345"),
        (0.3379, "0.338"),
        (1.9e-6, "1.9×10⁻⁶"),
        (7.2893, "7.29"),
        (None, "none"),
        (math.nan, "not a number"),
        (-0.5, "−0.5"),
        (101.54, "102"),
        (1234.5, "1\u202f234"),
    ],
)
def test_numbers_are_shown_with_three_digits_and_integers_whole(value: float | None, shown: str) -> None:
    assert format_number(value) == shown


def test_published_numbers_and_constants_say_where_they_stand() -> None:
    numbers, constants = load_published(), load_constants()
    assert numbers["price.stock_9"].value == 1.28
    assert all(n.about and n.where for n in [*numbers.values(), *constants.values()])
    assert {n.row for n in numbers.values()} <= set(range(1, 42))


def test_constants_are_those_of_the_code_that_uses_them() -> None:
    from hiraishin.numerics.attention import SPLIT_FROM
    from hiraishin.numerics.occupancy import PADDING
    from hiraishin.profile import MAX_WIDTH

    constants = {key: c.value for key, c in load_constants().items()}
    assert constants["kv.padding"] == PADDING
    assert constants["cpu.split_kv_from"] == SPLIT_FROM
    assert constants["switch.widest"] == MAX_WIDTH
