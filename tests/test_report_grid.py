"""Exact x margin stop x graphs: eight cells over the same prompts, told only where all eight were run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import figures_synthetic as synthetic
import pytest
import report_synthetic as made_up
from bs4 import BeautifulSoup

from hiraishin import paths
from hiraishin.profile import load_profile
from hiraishin.report.article import environment, gpu_chapters
from hiraishin.report.check import _bare_numbers
from hiraishin.report.facts import Book
from hiraishin.report.grid import Grid, grids
from hiraishin.results import Result, ResultSet
from hiraishin.tasks import ARMS, arm_without

STOCK_WITH_GRAPHS = (
    "patched-without-guard+cuda-attention-8+cuda-mul-mat+cuda-attention-16+cuda-parallel-blocks+cuda-fast"
)
BUILDS = {
    "patched": (True, True),
    "patched-without-cuda-graphs": (True, False),
    STOCK_WITH_GRAPHS: (False, True),
    "patched-off": (False, False),
}


def run(build: str, stop: str, prompt: str, speed: float = 10.0) -> Result:
    exact = BUILDS.get(build, (True, True))[0]
    inputs = {"build": build, "fingerprint": build, "drafter": f"model Q2_K, {stop}", "prompt": prompt, "matrix": "grid",
              "draft_length": 8, "tokens": 96, "client_guard": False, "prefill": "whole"}  # fmt: skip
    record = {
        "identical": exact,
        "drafted": 40,
        "accepted": 30 if stop == "no margin" else 38,
        "tokens_per_second": speed,
        "plain_tokens_per_second": 7.0,
    }
    return synthetic.result("speculative", inputs, record)


def every(prompts: tuple[str, ...] = ("p", "q", "r")) -> list[Result]:
    return [
        run(build, stop, prompt, 10.0 * (number + 1))
        for build in BUILDS
        for stop in ("margin 3", "no margin")
        for number, prompt in enumerate(prompts)
    ]


def only(results: list[Result]) -> Grid:
    (grid,) = grids(synthetic.result_set(results))
    return grid


def test_the_shipped_profile_makes_all_eight() -> None:
    (matrix,) = load_profile("cuda-grid").runs
    labels = [*(ARMS[name].label for name in matrix.arms), *(arm_without(parts).label for parts in matrix.variants)]
    assert set(labels) == set(BUILDS)
    assert sorted(bool(d.margin) for d in matrix.drafters) == [False, True]


def test_each_cell_has_the_runs_of_its_setting() -> None:
    cells = {(c.exact, c.margin, c.graphs): c for c in only(every()).cells}
    assert len(cells) == 8
    assert {r.inputs["build"] for r in cells[False, True, True].runs} == {STOCK_WITH_GRAPHS}
    assert {r.inputs["build"] for r in cells[True, False, False].runs} == {"patched-without-cuda-graphs"}
    assert [cells[True, True, True].identical.striptags(), cells[False, True, False].identical.striptags()] == [
        "3",
        "0",
    ]
    assert cells[True, True, True].acceptance.striptags() == "95%"
    assert cells[True, False, True].acceptance.striptags() == "75%"
    assert (cells[True, True, True].speed.striptags(), cells[True, True, True].plain.striptags()) == ("20", "7")


def test_a_run_that_took_no_time_has_no_speed() -> None:
    def slow(result: Result) -> Result:
        return replace(result, record={**result.record, "tokens_per_second": None, "plain_tokens_per_second": None})

    cell = only([slow(r) if r.inputs["prompt"] == "q" else r for r in every()]).cells[0]
    assert 'value="20.0"' in cell.speed and 'value="7.0"' in cell.plain and 'value="3"' in cell.count
    assert 'value=""' in only([slow(r) for r in every()]).cells[0].speed


def test_only_prompts_that_all_eight_have_count() -> None:
    runs = [r for r in every() if not (r.inputs["build"] == "patched-off" and r.inputs["prompt"] == "r")]
    assert {len(cell.runs) for cell in only(runs).cells} == {2}


@pytest.mark.parametrize("missing", ["patched", "patched-off", STOCK_WITH_GRAPHS])
def test_seven_are_no_grid(missing: str) -> None:
    runs = [r for r in every() if r.inputs["build"] != missing or r.inputs["drafter"].endswith("no margin")]
    assert grids(synthetic.result_set(runs)) == []


def test_arms_that_are_half_exact_and_other_drafters_are_left_out() -> None:
    builds = (
        "patched-without-guard",
        "patched-without-cuda-mul-mat",
        "patched-without-cuda-fast",
        "stock",
        "patched-serial",
    )
    more = [run(build, "margin 3", "p") for build in builds]
    lookup = synthetic.result(
        "speculative", {**dict(more[0].inputs), "build": "patched", "drafter": "lookup, 3-grams"}, {}
    )
    assert only([*every(), *more, lookup]).cells == only(every()).cells


def test_the_chapter_shows_it_and_every_number_has_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "receipts_dir", lambda: tmp_path)
    results = ResultSet(made_up.profile(), {"gpu": {"name": "A Test GPU"}}, every(), name="cuda-grid")
    chapter = gpu_chapters([Book("grid", "A Test GPU", results.machine, (), results)], {})[0]
    html = environment().get_template("article/grid.html.j2").render(gpu=chapter)
    soup = BeautifulSoup(f"<main>{html}</main>", "html.parser")
    assert list(_bare_numbers(soup)) == [] and len(soup.find_all("tr")) == 9
