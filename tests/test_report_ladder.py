"""The ladder, the price of several variants, and the short version's sentences, on made-up results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import figures_synthetic as synthetic
import pandas as pd
import pytest
import report_synthetic as made_up
from bs4 import BeautifulSoup
from report_site import build, few_figures

from hiraishin import figures, paths
from hiraishin.bundle import write_bundle
from hiraishin.claims import claims
from hiraishin.figures import style
from hiraishin.report import publish
from hiraishin.report.facts import Book
from hiraishin.report.ladder import ladders
from hiraishin.report.prices import Priced, priced
from hiraishin.report.story import Story
from hiraishin.results import Result, ResultSet
from hiraishin.timing import summarize

STEPS = {
    "stock": 1.0,
    "patched-off": 1.0,
    "patched-without-cuda-mul-mat+cuda-attention-16+cuda-parallel-blocks": 0.5,
    "patched-without-cuda-mul-mat+cuda-attention-16+cuda-parallel-blocks+guard": 0.5,
    "patched-without-cuda-attention-16+cuda-parallel-blocks+guard": 0.4,
    "patched-without-cuda-parallel-blocks": 0.3,
    "patched-without-guard": 0.0,
    "patched": 0.0,
    "patched-without-cuda-fast": 0.0,
    "patched-serial": 0.0,
}


def replay(build: str, width: int, change: float, **more: Any) -> Result:
    record = {
        "positions": 10,
        "differing": 4 if change else 0,
        "max_abs_diff": change * width,
        "flips": int(change * 10),
        "first_differing_kv": 300 - width if change else None,
    }
    kv = list(range(236, 246))
    return synthetic.result(
        "replay", {"build": build, "width": width, "prompt": "long"} | more, record, {"kv_position": kv}
    )


def hunt(**more: Any) -> ResultSet:
    widths = {"stock": (2, 3, 4, 9), "patched": (2, 3, 9, 16)}
    return synthetic.result_set(
        [replay(b, w, change, **more) for b, change in STEPS.items() for w in widths.get(b, (2, 9))]
    )


def price_unit(arms: dict[str, float], **more: Any) -> Result:
    table: dict[str, list[Any]] = {"build": [], "width": [], "round": [], "ms": []}
    for arm, slope in arms.items():
        for width in (1, 2, 9):
            for turn in range(5):
                for key, value in zip(table, (arm, width, turn, 10 * (1 + slope * (width - 1))), strict=True):
                    table[key].append(value)
    inputs = {"context": 256, "weight_bytes": 4_000_000_000, "rounds": 5} | more
    return synthetic.result("price", inputs, {**summarize(table, {}), "base": "stock"}, table)


def book(results: list[Result]) -> Book:
    found = ResultSet(made_up.profile(), {"cpu": "A CPU", "gpu": {"name": "A GPU"}}, results)
    return Book("receipt", "A GPU", found.machine, tuple(claims(found)), found)


def test_a_ladder_has_a_row_a_step_in_the_order_of_the_hunt_at_the_widths_all_steps_share() -> None:
    (ladder,) = ladders(hunt())
    assert ladder.widths == [2, 9]
    assert [(r.treated, r.guard) for r in ladder.rungs] == [
        ("stock", None),
        ("attention 8", False),
        ("attention 8", True),
        ("+ mat-vec", False),
        ("+ attention 16", True),
        ("+ parallel blocks", False),
        ("+ parallel blocks", True),
    ]
    first, last = ladder.rungs[0], ladder.rungs[-1]
    assert [BeautifulSoup(str(n), "html.parser").text for n in first.largest] == ["2", "9"]
    assert BeautifulSoup(str(first.first), "html.parser").text == "291"
    assert [BeautifulSoup(str(n), "html.parser").text for n in last.largest] == ["0", "0"]
    assert last.first == "none"


def test_a_gpu_that_pretends_has_a_ladder_of_its_own_from_the_switched_off_build() -> None:
    both = [*hunt().results, *(r for r in hunt(env="NSM=26").results if r.inputs["build"] != "stock")]
    real, pretended = ladders(synthetic.result_set(both))
    assert (real.setting, pretended.setting) == ("", "NSM=26")
    assert pretended.rungs[0].treated == "switch off"
    assert [r.treated for r in real.rungs].count("switch off") == 0


def test_two_arms_are_no_ladder() -> None:
    assert ladders(synthetic.result_set([replay(b, 2, 0.0) for b in ("stock", "patched", "patched-off")])) == []


def test_a_price_is_quoted_from_one_unit_the_one_with_every_variant() -> None:
    old = price_unit({"stock": 0.1, "patched": 0.5}, code="old")
    new = price_unit({"stock": 0.2, "patched": 0.15, "patched-without-cuda-fast": 0.5}, code="new")
    story = Story(book([old, new]))
    assert story.price_wide is not None
    found = {name: fact.value for name, fact in story.price_wide.items()}
    assert found == pytest.approx({"stock": 2.6, "patched": 2.2, "patched-without-cuda-fast": 5.0})
    assert [name for name, _ in story.price_variants] == ["patched without cuda-fast"]
    assert story.prices is not None
    assert [row["build"] for row in story.prices["rows"]] == ["stock", "patched", "patched without cuda-fast"]


def test_a_receipt_of_prices_alone_has_a_price_and_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_figures(monkeypatch, ("price",))
    arms = {"stock": 0.2, "patched": 0.15, "patched-without-cuda-fast": 0.5}
    unit = price_unit(arms, model="synthetic-qwen3-8b", quant="Q4_K_M", gpu_layers=99)
    machine = {"cpu": "A CPU", "gpu": {"name": "A Test GPU"}}
    write_bundle(ResultSet(made_up.profile(), machine, [unit], name="prices"), tmp_path / "receipts" / "prices")
    monkeypatch.setattr(paths, "receipts_dir", lambda: tmp_path / "receipts")
    outcome = build(tmp_path / "html", made_up.run())
    assert outcome.failures == []
    page = BeautifulSoup(outcome.index.read_text(encoding="utf-8"), "html.parser")
    short = page.select_one(".short")
    assert short is not None
    words = " ".join(short.get_text(" ").split())
    assert (
        "On an A Test GPU , with synthetic-qwen3-8b Q4_K_M , a pass of 9 tokens costs 2.20× exactly and 2.60× on stock"
        in words
    )
    assert "5.00× patched without cuda-fast" in words
    assert page.select_one("#prices-fig-price") is not None


def test_a_tiny_model_with_more_arms_does_not_speak_for_a_large_one() -> None:
    tiny = price_unit(
        {"stock": 0.1, "patched": 0.1, "patched-without-cuda-fast": 0.2}, model="tiny", weight_bytes=10**8
    )
    large = price_unit({"stock": 0.2, "patched": 0.3}, model="large")
    assert [u.result.inputs["model"] for u in priced(book([tiny, large]))] == ["large", "tiny"]


def test_every_variant_of_a_price_unit_is_drawn_and_named_losers_included() -> None:
    module = figures.find("price")
    unit = price_unit({"stock": 0.2, "patched": 0.15, "patched-without-cuda-fast": 0.5})
    data = module.data(synthetic.result_set([unit]))
    (axes,) = module.draw(data, style.LIGHT).axes
    labels = axes.get_legend_handles_labels()[1]
    assert {"stock, measured", "exact, measured", "exact without cuda-fast, measured"} <= set(labels)
    assert "exact without cuda-fast 5.00×" in module.alt(data)


def test_figures_are_published_from_a_finished_report_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_figures(monkeypatch, ("float-order",))
    site = build(tmp_path / "html", made_up.run()).index.parent
    written = publish.publish(site, tmp_path / "figures")
    assert sorted(p.name for p in written) == [
        "README.md",
        "float-order.dark.svg",
        "float-order.json",
        "float-order.light.svg",
    ]
    page = (tmp_path / "figures" / "README.md").read_text(encoding="utf-8")
    assert 'srcset="float-order.dark.svg"' in page
    assert publish.main([str(site), "--to", str(tmp_path / "figures")]) == 0  # again, over the old ones
    (site / "report.json").unlink()
    assert publish.main([str(site), "--to", str(tmp_path / "figures")]) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("keep", encoding="utf-8")
    assert publish.main([str(site), "--to", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine" / "precious.txt").is_file()


@pytest.mark.parametrize(
    ("times", "steady"),
    [
        ([10.0] * 11, True),
        ([7.0, *[9.0, 9.5, 10.0, 10.5, 11.0] * 2, 19.0], True),  # one pass far off, the median well known
        ([10.0] * 6 + [20.0] * 5, False),
        ([9.0, 10.0, 11.0], True),  # too few for an interval: all of them count
        ([9.0, 10.0, 13.0], False),
    ],
)
def test_a_price_is_quoted_when_its_median_is_known_well_enough(times: list[float], steady: bool) -> None:
    table = pd.DataFrame({"build": "stock", "width": 1, "ms": times})
    other = pd.DataFrame({"build": ["stock", "patched"], "width": [2, 1], "ms": [99.0, 0.1]})
    unit = SimpleNamespace(table=pd.concat([table, other]), record={"base": "stock"})
    assert Priced(unit, {}).steady is steady
