"""Pages of docs/ that are made from data or from the tests are in step with them."""

from __future__ import annotations

import functools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.results import ResultSet


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


@pytest.mark.parametrize(
    ("stock", "said", "not_said"),
    [
        (2.45, "This is one candidate for a number", "do not explain"),
        (1.03, "do not explain a number", "one candidate"),
    ],
)
def test_graphs_recorded_anew_explain_the_posts_number_only_where_they_cost(
    stock: float, said: str, not_said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = script("make_price.py")["page"]
    monkeypatch.setitem(page.__globals__, "alternating", lambda *_: {"stock": stock, "patched": 1.03})
    text = page()
    assert said in text and not_said not in text and f"{stock} times as long" in text


def test_the_bits_of_the_fast_kernels_are_counted_not_claimed() -> None:
    made = script("make_price.py")
    assert made["Bench"]("q4k_fast", "fast").wrong() == {"fast C=8 R=3 NW=4 W=16": 8}
    for name, prefix in (("q4k_ring", "ring"), ("q4k_mma", "mma")):
        bench = made["Bench"](name, prefix)
        counted = [n for here in bench.results.values() for n in here if n.startswith(prefix)]
        assert len(counted) > 20 and bench.wrong() == {}


def test_words_that_the_data_no_longer_bear_out_are_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = script("make_price.py")
    plain = {"with": {"stock": 100.0, "patched-off": 130.0, "patched": 140.0}}
    monkeypatch.setitem(made["main"].__globals__, "plain_decodes", lambda: plain)
    assert made["main"](["--check"]) == 2
    assert "the data no longer say that plain decoding does not show recorded graphs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["make_price.py", "make_localizer.py"])
def test_a_receipt_that_cannot_be_read_is_one_line_and_leaves_the_page(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: Path) -> ResultSet:
        raise UserError("the receipt sent is damaged", "Get it from its sender again.")

    made = script(name)
    monkeypatch.setitem(made["main"].__globals__, "load_receipt", damaged)
    assert made["main"](["--check"]) == 2
    assert capsys.readouterr().err.endswith("the receipt sent is damaged. Get it from its sender again.\n")


def test_the_localizers_page_quotes_the_score_of_its_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("make_localizer.py")["main"](["--check"]) == 0, capsys.readouterr().err


def test_the_page_on_cuda_says_what_the_server_check_found() -> None:
    check = json.loads((paths.ROOT / "data" / "compiled" / "server-h200.json").read_text(encoding="utf-8"))
    page = (paths.ROOT / "patches" / "cuda.md").read_text(encoding="utf-8").split("## llama-server")[1]
    said = re.findall(r"^\| (?!server|---)(.+) \| (\d+) of (\d+) \|$", page, re.MULTILINE)
    counts = {arm["name"]: (arm["differing"], arm["prompts"]) for arm in check["arms"]}
    names = ["stock", "patched-off", "patched", "stock-again"]
    assert [(int(k), int(n)) for _, k, n in said] == [counts[name] for name in names]
    assert counts["patched"][0] == 0 < counts["stock"][0]


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


def test_the_counts_of_operator_tests_on_a_gpu_are_those_of_their_record() -> None:
    record = (paths.ROOT / "data" / "compiled" / "op-tests-h200.txt").read_text(encoding="utf-8")
    told = (paths.ROOT / "patches" / "cuda.md").read_text(encoding="utf-8")
    table = told.partition("## Operator tests on an H200")[2].partition("\n## ")[0].replace(",", "")
    counts = re.findall(r"^\|.*\| (\d+) of (\d+) \|$", table, re.MULTILINE)
    assert sorted(counts) == sorted(re.findall(r"^(\d+)/(\d+) tests passed", record, re.MULTILINE))
