"""The hunt on one watched pass: steps in the order in which causes are treated, told only where they are one series."""

from __future__ import annotations

from typing import Any

import figures_synthetic as synthetic
import report_synthetic as made_up

from hiraishin.claims import claims
from hiraishin.notebook import hunt_table
from hiraishin.report.facts import Book
from hiraishin.report.hunt import hunted
from hiraishin.report.story import Story
from hiraishin.results import Result

ATTENTION = {"op": "FLASH_ATTN_EXT", "tensor": "attn-0", "weight_type": "f32", "switch": "split KV"}
PRODUCT = {"op": "MUL_MAT", "tensor": "ffn_out-3", "weight_type": "q4_K", "switch": "repack"}


def watched(left_out: str, origins: list[dict[str, Any]], **more: Any) -> Result:
    inputs = {"build": f"patched-without-{left_out}" if left_out else "patched", "prompt": "p", "width": 8, **more}
    record = {
        "width": 8,
        "kv_position": 1300,
        "origins": origins,
        "differing_rows": len(origins),
        "differing_operations": 1,
    }
    return synthetic.result("localize", inputs, record | {"operations": 9, "watching_changed_rows": 0})


SERIES = made_up.hunt()[::-1]


def test_each_step_names_what_is_treated_by_then_whatever_order_the_results_come_in() -> None:
    steps = hunted(synthetic.result_set(SERIES))
    assert [step.treated for step in steps] == [(), ("a",), ("a", "b")]
    assert [len(step.result.record["origins"]) for step in steps] == [1, 2, 0]


def test_arms_that_are_no_series_one_arm_and_passes_of_other_prompts_are_no_hunt() -> None:
    assert hunted(synthetic.result_set([watched("a", []), watched("b+c", [])])) == []
    assert hunted(synthetic.result_set([watched("a+b", [ATTENTION])])) == []
    assert hunted(synthetic.result_set([watched("a+b", [ATTENTION]), watched("b", [], prompt="q")])) == []
    assert hunted(synthetic.result_set([watched("", []), watched("", [], width=9)])) == []


def test_the_article_and_the_notebook_tell_the_same_steps() -> None:
    results = synthetic.result_set(SERIES)
    rows = Story(Book("run", "A CPU", results.machine, tuple(claims(results)), results)).hunt
    assert [(r["treated"], r["origins"].value, r["operation"]) for r in rows] == [
        ("none", 1, "FLASH_ATTN_EXT"),
        ("a", 2, "MUL_MAT"),
        ("a, b", 0, ""),
    ]
    assert "1\u202f300" in rows[0]["kv"] and rows[0]["width"].striptags() == "8"
    table = hunt_table(results)
    assert list(table["treated"]) == ["none", "a", "a, b"]
    assert list(table["operations that start a difference"]) == [1, 2, 0]
    assert table["of which kinds"][1] == "MUL_MAT q4_K (repack)"
