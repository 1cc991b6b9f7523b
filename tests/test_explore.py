"""Sliders, parameters and notebooks: each figure belongs to one notebook, and what a slider shows a function computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import figures_synthetic as synthetic
import pytest

from hiraishin import explore, figures, paths
from hiraishin.errors import UserError
from hiraishin.results import ResultSet

NOTEBOOKS = paths.ROOT / "notebooks"


@pytest.fixture(scope="module")
def results() -> ResultSet:
    return synthetic.result_set(synthetic.replays())


def _sources(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def test_every_figure_belongs_to_exactly_one_notebook() -> None:
    shown: dict[str, list[str]] = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for figure_id in re.findall(r'figures\.show\(\s*"([a-z-]+)"', _sources(path)):
            shown.setdefault(figure_id, []).append(path.stem)
    assert shown == {figure_id: [module.NOTEBOOK] for figure_id, module in figures.registry().items()}


@pytest.mark.parametrize("name", ["02_float_order", "03_replay", "05_padding", "06_parallel_blocks", "09_price"])
def test_a_notebook_is_thin_and_starts_with_checked_parameters(name: str) -> None:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert len(notebook["cells"]) <= 15
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert code[0]["metadata"]["tags"] == ["parameters"]
    for line in "".join(code[0]["source"]).splitlines():
        assert re.match(r"\w+: \w+ = .+  # \w", line), line
    assert re.search(r"(checked|narrowed|load_profile)\(", "".join(code[1]["source"]))
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)


def test_parameters_of_another_type_or_out_of_range_are_named() -> None:
    for value, words in ((True, "not a whole number"), (2.0, "not a whole number"), (9, "is 9"), (-1, "is -1")):
        with pytest.raises(UserError, match=f"row.*{words}"):
            explore.checked("default", row=(value, 0, 3))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="profile"):
        explore.checked(6.13e62)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="nothing-like-that"):
        explore.checked("nothing-like-that")


def test_a_replay_is_narrowed_to_what_is_given_and_left_alone_otherwise() -> None:
    assert explore.narrowed("default") == explore.checked("default")
    one = explore.narrowed("default", prompt="lru-cache", widths=[7, 2], threads=1)
    (matrix,) = one.replay
    assert matrix.prompts == ["lru-cache"]
    assert matrix.widths == [1, 2, 7]
    assert one.settings.threads == 1
    assert not (one.price or one.runs or one.localize)
    for given in ({"widths": "2, 3"}, {"widths": [2.0]}, {"widths": [17]}, {"threads": -1}, {"tokens": True}):
        with pytest.raises(UserError):
            explore.narrowed("default", **given)


def test_a_row_of_the_explorer_holds_both_candidates(results: ResultSet) -> None:
    row = explore.replay_row(results, "stock", "lru-cache", 16, 5)
    assert list(row.columns) == ["rank", "token alone", "logit alone", "token in the batch", "logit in the batch"]
    assert len(row) == 5
    assert row.attrs["differing"]
    assert "the logits moved by up to" in explore.replay_words(row)


def test_an_equal_row_says_so_even_when_its_replay_keeps_no_table(results: ResultSet) -> None:
    bare = next(r for r in results.of("replay") if r.table is None)
    for prompt, width in (("lru-cache", 2), (bare.inputs["prompt"], bare.inputs["width"])):
        row = explore.replay_row(results, "patched", prompt, width, 3)
        assert row.empty
        assert explore.replay_words(row).endswith("the two rows are equal bit for bit")


def test_a_replay_or_position_that_is_not_there_is_named(results: ResultSet) -> None:
    with pytest.raises(UserError, match="no replay of 'lru-cache' at width 7"):
        explore.replay_row(results, "stock", "lru-cache", 7, 0)
    with pytest.raises(UserError, match="no position 5000"):
        explore.replay_row(results, "stock", "lru-cache", 4, 5000)
    with pytest.raises(UserError, match="no replay"):
        explore.replay(synthetic.result_set([]))


def test_the_example_is_a_flip_when_there_is_one(results: ResultSet, capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.replay_example(results).attrs["flip"]
    assert "the argmax flipped" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["float_order", "warp_partition", "padding", "parallel_blocks"])
def test_a_slider_redraws_through_the_same_function(name: str) -> None:
    panel: Any = getattr(explore, name)()
    controls = panel.kwargs
    panel.update()
    assert isinstance(panel.result, figures.Shown)
    assert set(controls) >= {"row"} or set(controls) & {"boundary", "position"}


def test_the_replay_explorer_opens_on_the_example(results: ResultSet) -> None:
    panel: Any = explore.replay(results)
    panel.update()
    assert panel.result.attrs["flip"]
