"""What an end-to-end run dictates (guesses and what is kept of them), and one on a tiny model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hiraishin.builds import find_build
from hiraishin.errors import UserError

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "end_to_end.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("end_to_end", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["end_to_end"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_cycles_give_exactly_the_tokens_asked_for_and_keep_no_more_than_they_guess(
    tool: ModuleType, tokens: int
) -> None:
    for seed in range(20):
        cycles = tool.plan(tokens, right=0.8, go_on=0.7, most=4, seed=str(seed))
        assert sum(kept + 1 for _, kept in cycles) == tokens
        assert all(0 <= kept <= guessed <= 4 for guessed, kept in cycles)
        assert cycles == tool.plan(tokens, right=0.8, go_on=0.7, most=4, seed=str(seed))


def test_the_default_rates_make_the_cycles_of_the_post(tool: ModuleType) -> None:
    cycles = [c for s in range(300) for c in tool.plan(400, right=0.870, go_on=0.492, most=8, seed=str(s))]
    guessed, kept = (sum(c[i] for c in cycles) for i in (0, 1))
    assert kept / guessed == pytest.approx(0.773, abs=0.01)
    assert 1 + guessed / len(cycles) == pytest.approx(2.97, abs=0.05)


@pytest.mark.parametrize("text", ["", "stock", "=stock", "a=b,16,no-such-part", "a=b,16,guard,guard"])
def test_an_arm_that_makes_no_sense_is_refused(tool: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="parts: guard"):
        tool.parse_arm(text)


@pytest.mark.real_model
def test_an_exact_arm_picks_what_the_plain_decode_picked(tool: ModuleType, tmp_path: Path) -> None:
    try:
        find_build("patched")
    except UserError as error:
        pytest.skip(str(error))
    out = tmp_path / "out.json"
    sizes = [
        "--right",
        "0.6",
        "--prompts",
        "1",
        "--prompt-tokens",
        "40",
        "--tokens",
        "30",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    models = ["--target", "tiny:Q4_K_M", "--draft", "tiny:Q8_0", "--gpu-layers", "0"]
    assert tool.main([*models, *sizes, "--arm", "exact=patched,16", "--out", str(out)]) == 0
    (arm,) = json.loads(out.read_text(encoding="utf-8"))["arms"]
    for kind in ("plain", "speculative"):
        assert arm[kind]["tokens"] == 30
        assert arm[kind]["picks"] == arm[kind]["picks_as_plain"] == 30
    assert arm["speculative"]["guessed"] > arm["speculative"]["kept"] > 0
