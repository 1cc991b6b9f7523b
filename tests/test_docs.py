"""Pages of docs/ that are made from data or from the tests are in step with them."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import pytest

from hiraishin import paths


@functools.cache
def script(name: str) -> dict[str, Any]:
    """What a script in docs/ defines; nothing of it has run."""
    return runpy.run_path(str(paths.ROOT / "docs" / name))


def test_the_price_page_quotes_its_data() -> None:
    assert script("make_price.py")["main"](["--check"]) == 0


@pytest.mark.parametrize(
    ("widths", "words"), [([2], "2"), ([2, 3, 4], "2 to 4"), ([2, 3, 7, 9, 10], "2 to 3, 7, 9 to 10"), ([], "")]
)
def test_widths_are_put_in_words(widths: list[int], words: str) -> None:
    assert script("make_price.py")["widths_in_words"](widths) == words


def test_a_price_page_that_was_edited_by_hand_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = script("make_price.py")
    (tmp_path / "docs").mkdir()
    text = (paths.ROOT / "docs" / "price.md").read_text(encoding="utf-8")
    (tmp_path / "docs" / "price.md").write_text(text.replace("1", "2", 1), encoding="utf-8")
    monkeypatch.setitem(made["main"].__globals__, "page", lambda: text)
    monkeypatch.setitem(made["main"].__globals__, "ROOT", tmp_path)
    assert made["main"](["--check"]) == 1
    assert "out of step" in capsys.readouterr().err


def test_the_bits_of_the_fast_kernel_are_counted_not_claimed() -> None:
    bench = script("make_price.py")["Bench"]()
    assert bench.wrong() == {"fast C=8 R=3 NW=4 W=16": 8}
    assert all(bench.compiled[name] for here in bench.results.values() for name in here if not name.startswith("pack"))


def test_the_hard_use_page_names_tests_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("make_hard_use.py")["main"](["--check"]) == 0, capsys.readouterr().err


def test_a_test_that_was_renamed_is_missed(tmp_path: Path) -> None:
    made = script("make_hard_use.py")
    (tmp_path / "test_results.py").write_text(
        "import pytest\npytestmark = pytest.mark.slow\n\n@pytest.mark.hard\ndef test_a(): ...\n\ndef helper(): ...\n",
        encoding="utf-8",
    )
    tests = made["tests_of"](tmp_path)
    assert tests == {"results::a": {"slow", "hard"}}
    assert "results::any_plain_value_survives_the_store" in made["unknown"](tests)
