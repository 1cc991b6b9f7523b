"""Origins told from what they spoil, on graphs made up for it; then the real switches of the real builds, by name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from localize_fakes import CHAIN, Ops, graph, lone
from localize_real import QUIET, localized

from hiraishin.builds import find_build
from hiraishin.dispatch import kernel_switch
from hiraishin.errors import UserError
from hiraishin.localize import Compared, compare_passes, table_of
from hiraishin.watch import Node
from hiraishin.worker import Worker


def verdicts(compared: list[Compared]) -> dict[str, str]:
    table = table_of(compared, 2, {"threads": 1})
    return {name: v for name, v in zip(table["tensor"], table["verdict"], strict=True) if v != "equal"}


def everything_from(*names: str, tokens: tuple[int, ...] = (1,)) -> dict[tuple[str, int], int]:
    return {(name, token): 1 for name in names for token in tokens}


def test_equal_passes_have_no_origin() -> None:
    assert verdicts(compare_passes(lone(CHAIN, 3), [graph(CHAIN, [0, 1, 2], {})], [3])) == {}


def test_the_first_operation_that_differs_is_the_origin_and_what_reads_it_is_propagated() -> None:
    moved = everything_from("kqv-0", "ffn_out-0", "result")
    found = compare_passes(lone(CHAIN, 2), [graph(CHAIN, [0, 1], moved)], [2])
    assert verdicts(found) == {"kqv-0": "origin", "ffn_out-0": "propagated", "result": "propagated"}
    origin = found[4]
    assert (origin.differing, origin.origin) == ([False, True], [False, True])
    assert origin.first_element == 1
    assert origin.max_abs_diff == pytest.approx(2**-21)  # an ulp of 5.26
    assert origin.relative is not None and 0 < origin.relative < 1e-6


def test_two_independent_causes_are_two_origins() -> None:
    moved = everything_from("Qcur-0") | everything_from("ffn_out-0", "result", tokens=(0,))
    found = verdicts(compare_passes(lone(CHAIN, 2), [graph(CHAIN, [0, 1], moved)], [2]))
    # Token 1's Q differs and is swallowed by the attention; token 0's last multiplication differs for itself.
    assert found == {"Qcur-0": "origin", "ffn_out-0": "origin", "result": "propagated"}


def test_an_origin_for_one_token_is_not_hidden_by_propagation_for_another() -> None:
    moved = everything_from("norm-0", "Qcur-0", "kqv-0", tokens=(0,)) | everything_from("kqv-0", tokens=(1,))
    found = compare_passes(lone(CHAIN, 2), [graph(CHAIN, [0, 1], moved)], [2])
    # Attention reads the row of K that token 0 wrote, and that one was equal.
    assert found[4].origin == [False, True]


def test_rows_of_the_cache_carry_a_difference_to_later_tokens_only() -> None:
    moved = everything_from("Kcur-0", tokens=(1,)) | everything_from("kqv-0", tokens=(0, 1, 2))
    found = compare_passes(lone(CHAIN, 3), [graph(CHAIN, [0, 1, 2], moved)], [3])
    assert verdicts(found)["Kcur-0"] == "origin"
    stored, attention = found[2], found[4]
    assert stored.origin == [False, False, False]  # a copy starts nothing
    assert stored.differing == [False, True, True]
    assert attention.origin == [True, False, False]  # token 0 cannot blame a row that came after it


def test_a_pass_that_the_library_split_is_compared_graph_by_graph() -> None:
    parts = [graph(CHAIN, [0, 1], {}), graph(CHAIN, [2], everything_from("ffn_out-0", "result", tokens=(2,)))]
    found = compare_passes(lone(CHAIN, 3), parts, [2, 1])
    assert verdicts(found) == {"ffn_out-0": "origin", "result": "propagated"}
    assert found[5].differing == [False, False, True]


def test_a_range_that_grew_inside_the_pass_is_compared_where_both_have_cells() -> None:
    ops = [*CHAIN[:4], ("mask-0", "SOFT_MAX", (3,)), ("result", "ADD", (4,))]
    same = compare_passes(lone(ops, 2, cells=[256, 512]), [graph(ops, [0, 1], {}, 512)], [2])
    assert verdicts(same) == {}
    moved = compare_passes(
        lone(ops, 2, cells=[256, 512]), [graph(ops, [0, 1], everything_from("mask-0", tokens=(0,)), 512)], [2]
    )
    assert verdicts(moved) == {"mask-0": "origin"}


def test_graphs_of_different_operations_are_refused() -> None:
    other = [*CHAIN[:-1], ("result", "MUL", (5, 0))]
    with pytest.raises(UserError, match="graphs of different operations"):
        compare_passes(lone(CHAIN, 2), [graph(other, [0, 1], {})], [2])
    with pytest.raises(UserError, match="graphs of different operations"):
        compare_passes(lone(CHAIN, 2), [graph(CHAIN[:-1], [0, 1], {})], [2])


def test_a_pass_whose_graphs_do_not_add_up_is_refused() -> None:
    with pytest.raises(UserError, match="ran as 1 graphs over 2 of 3 tokens"):
        compare_passes(lone(CHAIN, 3), [graph(CHAIN, [0, 1], {})], [2])


def test_a_value_that_is_not_finite_has_no_size_and_counts_as_a_difference() -> None:
    batch = graph(CHAIN, [0, 1], {})
    assert batch[5].bits is not None
    batch[5].bits[0, 0, 1, 0] = np.array([np.nan], np.float32).view(np.uint32)[0]
    found = compare_passes(lone(CHAIN, 2), [batch], [2])
    assert verdicts(found) == {"ffn_out-0": "origin"}
    assert (found[5].max_abs_diff, found[5].relative) == (None, float("inf"))
    assert table_of(found, 2, {"threads": 1})["relative"][5] == 1e30  # JSON has no infinity


@pytest.mark.parametrize(
    ("op", "kind", "buffer", "width", "threads", "name"),
    [
        ("MUL_MAT", "q4_K", "CPU_REPACK", 4, 1, "repack: gemm from 4 columns, gemv below"),
        ("MUL_MAT", "q6_K", "CPU", 8, 1, "tiled: from 8 columns"),
        ("MUL_MAT", "f16", "CPU", 2, 1, "sgemm: from 2 columns"),
        ("MUL_MAT", "q8_0", "CPU", 8, 1, ""),
        ("MUL_MAT", "q4_K", "CPU_AMX", 8, 1, "AMX: tiles for many columns, AVX512-VNNI for one"),
        ("FLASH_ATTN_EXT", "f32", "CPU", 2, 2, "split KV: one query, from 512 cells, over the threads"),
        ("FLASH_ATTN_EXT", "f32", "CPU", 2, 1, ""),
        ("ROPE", "f32", "CPU", 2, 2, ""),
        ("FLASH_ATTN_EXT", "f32", "CUDA0", 2, 1, "attention: vector kernel for one query, tensor-core kernel for more"),
        ("MUL_MAT", "q4_K", "CUDA0", 3, 1, "mmvq: 4 warps to 4 columns"),
        ("MUL_MAT", "q4_K", "CUDA0", 5, 1, "mmvq: 4 warps to 4 columns, 2 from 5"),
        ("MUL_MAT", "q4_K", "CUDA0", 9, 1, "mmq: from 9 columns; mmvq below"),
        ("MUL_MAT", "f16", "CUDA0", 9, 1, "mmvf: mat-vec for few columns, mmf or cuBLAS for more"),
    ],
)
def test_the_switch_is_named(op: str, kind: str, buffer: str, width: int, threads: int, name: str) -> None:
    assert kernel_switch(op, kind, buffer, (64, width, 1, 1), width, {"threads": threads}) == name


# The real builds.


@pytest.fixture(scope="module")
def stock() -> Iterator[Worker]:
    with Worker(find_build("stock"), QUIET) as worker:
        yield worker


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("quant", "width", "tensor", "weight_type", "switch"),
    [
        ("Q4_K_M", 4, "ffn_out-3", "q4_K", "repack: gemm from 4 columns, gemv below"),
        ("Q4_K_M", 8, "ffn_out-0", "q6_K", "tiled: from 8 columns"),
        ("F16", 2, "Qcur-0", "f16", "sgemm: from 2 columns"),
    ],
)
def test_stock_switches_are_found_by_name(
    stock: Worker, quant: str, width: int, tensor: str, weight_type: str, switch: str
) -> None:
    found = localized(stock, quant, width)
    first = found["origins"][0]
    assert (first["tensor"], first["op"], first["weight_type"], first["switch"]) == (
        tensor,
        "MUL_MAT",
        weight_type,
        switch,
    )
    assert all(o["op"] == "MUL_MAT" for o in found["origins"])
    assert max(o["relative"] for o in found["origins"]) < 1e-3


def test_an_operation_that_nobody_saw_passes_on_what_its_inputs_were() -> None:
    ops: Ops = [
        ("inp", "MUL_MAT", (-1,)),
        ("norm", "RMS_NORM", (0,)),
        ("attn_norm", "MUL", (1,)),
        ("result", "ADD", (2,)),
    ]

    def unseen(made: list[Node]) -> list[Node]:
        made[1].bits = None
        return made

    alone = [unseen(g) for g in lone(ops, 2)]
    clean = verdicts(compare_passes(alone, [unseen(graph(ops, [0, 1], everything_from("attn_norm")))], [2]))
    assert clean == {"attn_norm": "origin"}  # of the fused pair
    spoiled = compare_passes(alone, [unseen(graph(ops, [0, 1], everything_from("inp", "attn_norm", "result")))], [2])
    assert [n for n, v in verdicts(spoiled).items() if v == "origin"] == ["inp"]


@pytest.mark.real_model
def test_watching_leaves_the_fused_norm_of_a_model_without_int8_alone(stock: Worker) -> None:
    assert localized(stock, "F16", 3)["watching_changed_rows"] == 0


@pytest.mark.real_model
def test_the_split_of_the_kv_range_is_found_where_the_padded_range_reaches_512(stock: Worker) -> None:
    found = localized(stock, "Q8_0", 2, prompt_id="long-minutes", prompt_tokens=255, tokens=6, threads=2)
    first = found["origins"][0]
    assert (first["op"], first["switch"]) == (
        "FLASH_ATTN_EXT",
        "split KV: one query, from 512 cells, over the threads",
    )
    assert found["kv_position"] + 2 > 256 >= found["kv_position"]
    assert {o["op"] for o in found["origins"]} == {"FLASH_ATTN_EXT"}


@pytest.mark.real_model
def test_without_flash_attention_the_two_multiplications_are_the_origins(stock: Worker) -> None:
    found = localized(stock, "Q8_0", 2, flash_attn=False)
    assert {o["tensor"].split("-")[0] for o in found["origins"]} <= {"kq", "kqv"}
    assert found["origins"][0]["layer"] == 0


@pytest.mark.real_model
@pytest.mark.parametrize("width", [4, 9])
def test_on_the_patched_build_no_operation_differs(width: int) -> None:
    with Worker(find_build("patched"), QUIET) as worker:
        found = localized(worker, "Q4_K_M", width)
    assert (found["origins"], found["differing_operations"], found["differing_rows"]) == ([], 0, 0)
