"""Figures: pure, the same bytes on every run, text readable, and honest about what is missing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType, SimpleNamespace

import figures_synthetic as synthetic
import figures_text
import numpy as np
import pandas as pd
import pytest

from hiraishin import figures
from hiraishin.errors import UserError
from hiraishin.figures import select, style
from hiraishin.figures.save import Saved, save, svg
from hiraishin.results import Result, ResultSet

COMPUTED = ("float-order", "kv-padding", "parallel-blocks", "warp-partition")
MEASURED = {
    "acceptance-by-category": ("speculative", "plain"),
    "cycle": ("speculative", "plain"),
    "flips-margins": ("replay", "trace"),
    "fork-positions": ("speculative",),
    "origins": ("localize",),
    "pass-to-scale": ("price", "bandwidth"),
    "price": ("price",),
    "replay-map": ("replay", "trace"),
    "speculative-cycle": ("speculative",),
    "verify-widths": ("speculative",),
}
EVERY = sorted([*COMPUTED, *MEASURED])


@pytest.fixture(scope="module")
def results() -> ResultSet:
    made = [
        *synthetic.replays(),
        *synthetic.prices(),
        *synthetic.bandwidths(),
        *synthetic.speculative_runs(),
        *synthetic.examples(),
        *synthetic.localized(),
    ]
    return synthetic.result_set(made)


@pytest.fixture(scope="module")
def saved(results: ResultSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Every figure, saved once for the tests that only read the files."""
    folder = tmp_path_factory.mktemp("figures")
    return {figure_id: save(figure_id, results, folder) for figure_id in EVERY}


def test_every_figure_is_found_from_its_file() -> None:
    assert sorted(figures.registry()) == EVERY


def test_two_figures_of_one_id_are_refused() -> None:
    one = ModuleType("hiraishin.figures.one")
    other = ModuleType("hiraishin.figures.other")
    one.ID = other.ID = "same"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="two figures are called 'same'"):
        figures.collect([one, other])


def test_an_unknown_figure_is_named() -> None:
    with pytest.raises(UserError, match="no figure 'nothing'"):
        figures.find("nothing")


@pytest.mark.parametrize("figure_id", EVERY)
def test_text_is_never_cut_off_overlapping_or_tiny(figure_id: str, results: ResultSet) -> None:
    module = figures.find(figure_id)
    data = module.data(results)
    assert figures_text.problems(module.draw(data, style.LIGHT), style.SMALL) == []  # both themes share the layout


def test_the_text_check_finds_planted_faults() -> None:
    figure = figures.find("float-order").draw(figures.find("float-order").data(synthetic.result_set([])), style.LIGHT)
    figure.text(0.98, 0.5, "runs out of the picture")
    figure.text(0.05, 0.5, "one text")
    figure.text(0.05, 0.5, "another on it")
    figure.text(0.5, 0.02, "small", fontsize=4)
    found = " ".join(figures_text.problems(figure, style.SMALL))
    assert "cut off: 'runs out" in found
    assert "overlap: 'one text' and 'another on it'" in found
    assert "smaller than" in found


@pytest.mark.parametrize("figure_id", EVERY)
def test_alt_text_and_caption_are_sentences_with_numbers(figure_id: str, saved: dict[str, Saved]) -> None:
    alt, caption = saved[figure_id].alt, saved[figure_id].caption
    assert re.search(r"\d", alt)
    assert alt[0].isupper()
    assert alt.endswith(".")
    assert caption.endswith(".")
    assert not re.search(r"\bnan\b|None", alt + caption)


@pytest.mark.parametrize("figure_id", EVERY)
def test_drawing_again_gives_the_same_bytes(figure_id: str, results: ResultSet, saved: dict[str, Saved]) -> None:
    module = figures.find(figure_id)
    data = module.data(results)
    for name, theme in style.THEMES.items():
        assert svg(module.draw(data, theme), theme) == saved[figure_id].files[f"{name}.svg"].read_bytes(), name


def test_saving_again_gives_the_same_files(results: ResultSet, saved: dict[str, Saved], tmp_path: Path) -> None:
    for figure_id in ("price", "warp-partition"):
        again = save(figure_id, results, tmp_path)
        assert sorted(again.files) == ["csv", "dark.svg", "json", "light.svg", "png"]
        for kind, path in again.files.items():
            assert path.read_bytes() == saved[figure_id].files[kind].read_bytes(), kind


@pytest.mark.parametrize("figure_id", EVERY)
def test_an_svg_keeps_text_as_text_and_names_no_date_or_address(figure_id: str, saved: dict[str, Saved]) -> None:
    for theme in ("light", "dark"):
        text = saved[figure_id].files[f"{theme}.svg"].read_text(encoding="utf-8")
        root = ET.fromstring(text)
        assert len(list(root.iter("{http://www.w3.org/2000/svg}text"))) > 3
        assert "<dc:date>" not in text
        assert not re.search(r'(href|src)="https?:', text)
        assert "sans-serif" in text
    for name in ("csv", "json"):
        assert saved[figure_id].files[name].stat().st_size < 700_000


@pytest.mark.parametrize("figure_id", sorted(MEASURED))
def test_provenance_lists_the_results_that_were_used(
    figure_id: str, results: ResultSet, saved: dict[str, Saved]
) -> None:
    about = json.loads(saved[figure_id].files["json"].read_text(encoding="utf-8"))
    assert {r["kind"] for r in about["results"]} == set(MEASURED[figure_id])
    known = {r.key for r in results.results}
    assert {r["key"] for r in about["results"]} <= known
    assert about["machine"] == {"cpu": "a test processor", "cores": 2}
    assert about["notebook"] == figures.find(figure_id).NOTEBOOK


@pytest.mark.parametrize("figure_id", COMPUTED)
def test_a_computed_figure_needs_no_results(figure_id: str, tmp_path: Path) -> None:
    about = json.loads(save(figure_id, synthetic.result_set([]), tmp_path).files["json"].read_text(encoding="utf-8"))
    assert about["results"] == []


@pytest.mark.parametrize("figure_id", sorted(MEASURED))
def test_an_empty_result_set_is_named(figure_id: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"figure {figure_id}: no "):
        save(figure_id, synthetic.result_set([]), tmp_path)


def _without(results: ResultSet, kind: str) -> ResultSet:
    return synthetic.result_set([r for r in results.results if r.kind != kind])


def test_a_missing_bandwidth_or_plain_run_is_named(results: ResultSet, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"figure pass-to-scale.*bandwidth"):
        save("pass-to-scale", _without(results, "bandwidth"), tmp_path)
    with pytest.raises(UserError, match=r"figure cycle.*plain"):
        save("cycle", _without(results, "plain"), tmp_path)


NAN = [
    ("replay-map", "replay", "max_abs_diff"),
    ("flips-margins", "replay", "max_abs_diff"),
    ("price", "price", "ms"),
    ("pass-to-scale", "price", "ms"),
    ("verify-widths", "speculative", "accepted"),
    ("origins", "localize", "index"),
]


@pytest.mark.parametrize(("figure_id", "kind", "column"), NAN)
def test_one_number_that_is_missing_is_named(
    figure_id: str, kind: str, column: str, results: ResultSet, tmp_path: Path
) -> None:
    spoiled: list[Result] = []
    done = False
    for r in results.results:
        if r.kind == kind and r.table is not None and not done and r.inputs.get("build", "stock") == "stock":
            table = r.table.copy()
            table[column] = table[column].astype(float)
            table.loc[0, column] = float("nan")
            spoiled.append(Result(r.unit, r.record, table, r.provenance, r.key))
            done = True
        else:
            spoiled.append(r)
    assert done
    with pytest.raises(UserError, match=f"figure {figure_id}: "):
        save(figure_id, synthetic.result_set(spoiled), tmp_path)


@pytest.mark.parametrize(
    "figure_id",
    ["replay-map", "flips-margins", "price", "pass-to-scale", "origins", "fork-positions", "verify-widths", "cycle"],
)
@pytest.mark.parametrize("build", ["stock", "patched"])
def test_one_build_alone_still_gives_a_picture(figure_id: str, build: str, results: ResultSet) -> None:
    kept = [r for r in results.results if r.inputs.get("build", build) == build and r.kind != "price"]
    for r in results.of("price"):
        assert r.table is not None
        kept.append(
            Result(r.unit, r.record, r.table[r.table["build"] == build].reset_index(drop=True), r.provenance, r.key)
        )
    module = figures.find(figure_id)
    data = module.data(synthetic.result_set(kept))
    assert figures_text.problems(module.draw(data, style.DARK), style.SMALL) == []
    assert module.alt(data)


def test_a_machine_where_stock_is_exact_gets_a_page_that_says_so(tmp_path: Path) -> None:
    exact = synthetic.result_set(synthetic.replays(exact_stock=True))
    assert "equal bit for bit" in save("replay-map", exact, tmp_path).alt
    saved = save("flips-margins", exact, tmp_path)
    assert "never flips" in saved.alt
    assert "nothing can flip" in saved.files["light.svg"].read_text(encoding="utf-8")


def test_published_numbers_stand_apart_and_are_labelled(results: ResultSet) -> None:
    module = figures.find("price")
    data = module.data(results)
    published = data[data["origin"] == "published"]
    assert len(published) == 5
    assert published["machine"].str.contains("RTX 5060").all()
    assert published["median_ms"].isna().all()
    figure = module.draw(data, style.LIGHT)
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert all("published" in label or ", measured" in label for label in labels)
    for line in figure.axes[0].get_lines():
        if "published" in str(line.get_label()):
            assert line.get_linestyle() in ("None", "none"), "published numbers are not joined to a series"
    assert "RTX 5060" in module.alt(data)


def test_the_price_is_over_the_one_token_pass_of_stock(results: ResultSet) -> None:
    data = figures.find("price").data(results)
    one = data[(data["build"] == "stock") & (data["width"] == 1)]
    assert one["ratio"].tolist() == [1.0]


def test_no_flip_lies_beyond_twice_the_difference(results: ResultSet) -> None:
    assert "none of them has a margin above twice" in figures.find("flips-margins").alt(
        figures.find("flips-margins").data(results)
    )


def test_the_forks_of_an_impossible_flip_are_counted() -> None:
    """Planted: a flip whose margin is larger than the logits could have moved it."""
    rows = synthetic.replays()
    stock = next(r for r in rows if r.inputs["build"] == "stock" and r.inputs["width"] == 16)
    assert stock.table is not None
    table = stock.table.copy()
    table.loc[0, ["margin", "max_abs_diff", "differing", "flip"]] = [5.0, 1.0, True, True]
    planted = [Result(r.unit, r.record, table if r is stock else r.table, r.provenance, r.key) for r in rows]
    module = figures.find("flips-margins")
    assert "1 of them have a margin above twice the difference" in module.alt(
        module.data(synthetic.result_set(planted))
    )


def test_the_profile_decides_which_setting_is_shown(results: ResultSet) -> None:
    other = [Result(r.unit, r.record, r.table, r.provenance, r.key) for r in results.of("replay")]
    moved = [
        Result(
            type(r.unit)(r.kind, {**r.inputs, "quant": "F16", "threads": 1}),
            r.record,
            r.table,
            r.provenance,
            r.key + "f",
        )
        for r in other[:8]
    ]
    profile = SimpleNamespace(
        model=SimpleNamespace(quant="F16"), settings=SimpleNamespace(threads=1, flash_attn=True, kv_type="f16")
    )
    shown = figures.find("replay-map").data(ResultSet(profile, {}, other + moved))  # type: ignore[arg-type]
    assert set(shown["quant"]) == {"F16"}
    assert set(figures.find("replay-map").data(ResultSet(None, {}, other + moved))["quant"]) == {"Q4_K_M"}


def test_tokens_of_a_cycle_are_drawn_as_they_are_and_never_as_formulas() -> None:
    hostile = ["$\\alpha$", "<script>", "\x1b[31m", "\n", "漢字", "a very long token indeed", "_", "%"]
    run = synthetic.examples()[0]
    example = {**run.record["example"], "drafts": hostile, "emitted": [*hostile[:3], "$"], "accepted": 3}
    made = synthetic.result_set(
        [Result(run.unit, {**run.record, "example": example}, run.table, run.provenance, run.key)]
    )
    module = figures.find("speculative-cycle")
    data = module.data(made)
    assert figures_text.problems(module.draw(data, style.LIGHT), style.SMALL) == []
    assert "8 guessed, 3 kept" in figures.show("speculative-cycle", made).light.replace("\n", " ")


def test_many_prompts_with_long_names_fit(results: ResultSet) -> None:
    renamed = []
    for n, r in enumerate(results.of("speculative")):
        inputs = {**r.inputs, "prompt": f"a-prompt-with-a-very-long-name-{n // 2:02d}"}
        renamed.append(Result(type(r.unit)(r.kind, inputs), r.record, r.table, r.provenance, r.key))
    module = figures.find("fork-positions")
    data = module.data(synthetic.result_set(renamed))
    assert figures_text.problems(module.draw(data, style.LIGHT), style.SMALL) == []


@pytest.mark.parametrize(
    ("figure_id", "parameters"),
    [
        *[("float-order", {"row": row, "columns": (1, n)}) for row, n in ((0, 5), (1, 8), (2, 1), (3, 5))],
        *[
            ("warp-partition", {"row": 1, "columns": c, "fused": f})
            for c, f in (((1, 5), False), ((3,), True), ((2, 4), True))
        ],
        *[
            ("kv-padding", {"boundary": b, "before": f, "width": w, "threads": t})
            for b, f, w, t in ((256, 0, 2, 1), (512, 15, 16, 2), (1024, 4, 9, 8), (768, 3, 3, 3))
        ],
        *[
            ("parallel-blocks", {"queries": (x,), "p": p, "threads": t})
            for x, p, t in ((0, (1, 1), 1), (390, (4, 4), 3), (1023, (8, 3), 8), (700, (6, 5), 2))
        ],
    ],
)
def test_every_place_of_the_sliders_gives_a_readable_picture(figure_id: str, parameters: dict[str, object]) -> None:
    module = figures.find(figure_id)
    data = module.data(synthetic.result_set([]), **parameters)
    assert figures_text.problems(module.draw(data, style.LIGHT), style.SMALL) == []
    assert module.alt(data)
    assert module.caption(data)


def test_a_shown_figure_brings_both_themes_and_alt_text(results: ResultSet) -> None:
    bundle, about = figures.show("price", results)._repr_mimebundle_()
    assert bundle["image/svg+xml"].lstrip().startswith("<?xml")
    assert about["image/svg+xml"]["dark"] != bundle["image/svg+xml"]
    assert about["image/svg+xml"]["alt"] == bundle["text/plain"]


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", style.THEMES.values(), ids=style.THEMES)
def test_text_colours_have_contrast(theme: style.Theme) -> None:
    for name in ("ink", "muted", "stock", "exact", "warn"):
        a, b = sorted((_luminance(getattr(theme, name)), _luminance(theme.paper)), reverse=True)
        assert (a + 0.05) / (b + 0.05) >= 4.5, f"{name} on {theme.name}"


def test_one_setting_prefers_what_covers_both_builds() -> None:
    frame = pd.DataFrame(
        {"build": ["stock", "stock", "stock", "patched"], "quant": ["A", "B", "A", "B"], "x": np.arange(4)}
    )
    assert select.one_setting(frame)["quant"].unique().tolist() == ["B"]


def test_a_drafter_is_named_in_words() -> None:
    assert select.drafter("model Q2_K, margin 3") == "draft model Q2_K, margin 3"
    assert select.drafter("lookup, 3-grams") == "prompt lookup, 3-grams"
    assert select.drafter("something") == "drafter something"


def test_an_exact_replay_stored_without_its_table_counts_as_rows_that_are_equal(results: ResultSet) -> None:
    bare = [r for r in results.of("replay") if r.table is None]
    assert len(bare) == 1
    data = figures.find("replay-map").data(results)
    mine = data[(data["build"] == "patched") & (data["width"] == 16) & (data["prompt"] == bare[0].inputs["prompt"])]
    assert len(mine) == bare[0].record["positions"]
    assert not mine["differing"].any()
    for build in ("stock", "patched"):
        expected = sum(r.record["positions"] for r in results.of("replay", build=build))
        assert (data["build"] == build).sum() == expected


def test_a_width_that_was_not_measured_is_empty_not_exact(results: ResultSet) -> None:
    kept = [
        r
        for r in results.results
        if not (r.kind == "replay" and r.inputs["build"] == "patched" and r.inputs["width"] == 9)
    ]
    data = figures.find("replay-map").data(synthetic.result_set(kept))
    assert not ((data["build"] == "patched") & (data["width"] == 9)).any()
    assert figures.find("replay-map").draw(data, style.LIGHT)


def test_overridden_experiments_stay_out_of_the_map(results: ResultSet) -> None:
    one = results.of("replay", build="stock")[0]
    odd = Result(type(one.unit)("replay", {**one.inputs, "env": "X=1"}), one.record, one.table, one.provenance, "odd")
    data = figures.find("replay-map").data(synthetic.result_set([odd]))
    assert data.empty
