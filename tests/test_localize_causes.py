"""Causes one at a time: the series taken patch by patch, and one ulp planted where a test says; real model, real builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from localize_real import QUIET, localized

from hiraishin.builds import find_build
from hiraishin.errors import UserError
from hiraishin.tasks import PARTS
from hiraishin.worker import Worker

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SERIES = ("guard", "cpu-mul-mat", "cpu-attention", "cpu-fast")
"""The parts that the CPU patches treat, in the order of the series (0003 to 0006)."""

REPACK, TILED = "repack: gemm from 4 columns, gemv below", "tiled: from 8 columns"
SPLIT = "split KV: one query, from 512 cells, over the threads"
PLACES: dict[str, dict[str, Any]] = {
    "short": {"prompt_id": "lru-cache"},
    "past 256": {"prompt_id": "long-minutes", "prompt_tokens": 300},
    "across 512": {"prompt_id": "long-minutes", "prompt_tokens": 508},
}
"""Where a pass of 8 begins: few cells; a padded range of 512, which two threads share; the padded range grows in the pass."""


@pytest.fixture(scope="module")
def patched() -> Iterator[Worker]:
    with Worker(find_build("patched"), QUIET) as worker:
        yield worker


Kinds = set[tuple[str, str, str]]
PRODUCTS: Kinds = {("MUL_MAT", "q4_K", REPACK), ("MUL_MAT", "q6_K", TILED)}
ATTENTION: Kinds = {("FLASH_ATTN_EXT", "f32", SPLIT)}
REMAINING: dict[str, tuple[Kinds, ...]] = {
    # place: what starts a difference with the first none, one, two, ... parts of the series on
    "short": (PRODUCTS, PRODUCTS, set(), set(), set()),
    # Every layer's products come after attention that differs already, so that none of them starts anything.
    "across 512": (ATTENTION, ATTENTION, ATTENTION, set(), set()),
}


def watched(worker: Worker, place: str, treated: tuple[str, ...]) -> dict[str, Any]:
    """A pass of 8 tokens with only these parts on."""
    off = sum(PARTS[part] for part in SERIES if part not in treated)
    return localized(worker, "Q4_K_M", 8, threads=2, start=0, parts_off=off, **PLACES[place])


def kinds(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(operation, weight type, switch) of every origin, in graph order."""
    return [(o["op"], o["weight_type"], o["switch"]) for o in record["origins"]]


@pytest.mark.hard
@pytest.mark.parametrize("place", ["short", "across 512"])
def test_patch_by_patch_the_origins_shrink_as_the_series_says(patched: Worker, place: str) -> None:
    seen = [watched(patched, place, SERIES[:count]) for count in range(len(SERIES) + 1)]
    assert [set(kinds(record)) for record in seen] == list(REMAINING[place])
    assert [bool(record["differing_rows"]) for record in seen] == [bool(left) for left in REMAINING[place]]
    # The guard by itself removes no kernel; it cuts the pass where the padded range grows.
    cut = [4, 4] if place == "across 512" else [8]
    assert [record["graphs"] for record in seen] == [[8]] + [cut] * len(SERIES)


@pytest.mark.parametrize(
    ("left_out", "place", "remaining"),
    [
        pytest.param("guard", "across 512", ATTENTION, marks=pytest.mark.hard),
        ("cpu-mul-mat", "short", PRODUCTS),
        ("cpu-attention", "short", set()),
        pytest.param("cpu-attention", "past 256", ATTENTION, marks=pytest.mark.hard),
        ("cpu-fast", "short", set()),
    ],
)
def test_without_one_part_only_its_cause_is_left(patched: Worker, left_out: str, place: str, remaining: Kinds) -> None:
    assert set(kinds(watched(patched, place, tuple(p for p in SERIES if p != left_out)))) == remaining


@pytest.mark.hard
def test_with_every_part_left_out_the_origins_are_those_of_stock(patched: Worker) -> None:
    with Worker(find_build("stock"), QUIET) as stock:
        found = localized(stock, "Q4_K_M", 8, threads=2, start=0, prompt_id="lru-cache")
    assert kinds(watched(patched, "short", ())) == kinds(found)


WITNESSES = (
    "attn_norm-0",
    "Vcur-2",
    "Kcur-4",
    "node_176",
    "attn_out-8",
    "ffn_inp-11",
    "ffn_norm-14",
    "ffn_swiglu-19",
    "ffn_out-23",
    "l_out-26",
)
"""Ten operations in ten layers; llama.cpp gives the attention of layer 5 no name but its number. ``Kcur-4`` names two, the
multiplication and the rotation of its output: both are perturbed."""


@pytest.mark.witness
@pytest.mark.parametrize("tensor", WITNESSES)
def test_one_ulp_planted_in_one_operation_of_batches_is_named_and_nothing_else(tensor: str) -> None:
    try:
        build = find_build("witness")
    except UserError:
        pytest.skip("no witness build: ./build.sh witness makes it, and so does make test-hard")
    with Worker(build, {**QUIET, "GGML_WITNESS_ULP": tensor}) as worker:
        found = localized(worker, "Q4_K_M", 3)
    assert {o["tensor"] for o in found["origins"]} == {tensor}
    # Two operations of one name: the second reads the first's changed rows, so it starts nothing.
    assert len(found["origins"]) == 1
