"""The CUDA dispatch, worked out: kernels by width, how the KV range is cut, and the H200 receipts it is held against."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hiraishin import paths, predict
from hiraishin.dispatch_cuda import (
    Card,
    Parts,
    Shape,
    column_path,
    pieces,
    predict_widths,
    tensor_core_cuts,
    uses_vector_kernel,
)
from hiraishin.errors import UserError
from hiraishin.gguf_header import read_header
from hiraishin.numerics.occupancy import Gpu, Heads, VectorAttention
from hiraishin.predict import Scored, score_receipt, shape_of
from hiraishin.results import load_receipt
from hiraishin.tasks import PARTS

AMPERE, ADA, HOPPER, LAPTOP = Card(860, 82), Card(890, 128), Card(900, 132), Card(1200, 26)
QWEN = Shape(32, 8, 128, frozenset({("q4_k", False, True), ("q6_k", False, True)}))
SETTINGS = {"flash_attn": True, "kv_type": "f16"}


def runs(kind: str, card: Card, *, expert: bool = False) -> list[tuple[Any, int]]:
    """(kernel, first width) of every change from 1 to 16 columns."""
    out: list[tuple[Any, int]] = []
    for width in range(1, 17):
        path = column_path(kind, expert, True, width, card)
        if not out or out[-1][0] != path:
            out.append((path, width))
    return out


@pytest.mark.parametrize(
    ("kind", "card", "expert", "expected"),
    [
        ("q4_k", HOPPER, False, [("mmvq, 4 warps", 1), ("mmvq, 2 warps", 5), ("mmq", 9)]),
        ("q4_k", LAPTOP, False, [("mmvq, 4 warps", 1), ("mmvq, 2 warps", 5), ("mmq", 6)]),
        ("q6_k", LAPTOP, False, [("mmvq, 4 warps", 1), ("mmvq, 2 warps", 5), ("mmq", 8)]),
        ("q2_k", ADA, False, [("mmvq, 4 warps", 1), ("mmq", 5)]),
        ("q8_0", HOPPER, True, [("mmvq, 4 warps", 1), ("mmvq, a warp a token", 2), ("mmq", 9)]),
        ("q3_k", AMPERE, True, [("mmvq, 4 warps", 1), ("mmvq, a warp a token", 2), ("mmq", 6)]),
        ("f32", HOPPER, False, [("mmvf", 1), ("mmf", 4)]),
        ("bf16", HOPPER, False, [("mmvf", 1), ("mmf", 2)]),
    ],
)
def test_products_change_kernels_where_the_source_says(
    kind: str, card: Card, expert: bool, expected: list[tuple[Any, int]]
) -> None:
    assert runs(kind, card, expert=expert) == expected


def test_a_shape_that_the_float_kernel_does_not_take_goes_to_cublas() -> None:
    assert column_path("f16", False, False, 5, HOPPER) == ("cublas", 5)


def test_a_lone_query_is_on_the_vector_kernel_from_ada_on() -> None:
    assert uses_vector_kernel(QWEN, "f16", 512, 1, HOPPER)
    assert not uses_vector_kernel(QWEN, "f16", 512, 2, HOPPER)
    assert not uses_vector_kernel(QWEN, "f16", 512, 1, AMPERE)
    assert uses_vector_kernel(QWEN, "q8_0", 512, 2, HOPPER) and not uses_vector_kernel(QWEN, "q8_0", 512, 3, HOPPER)
    wide = Shape(16, 2, 256, QWEN.kinds)
    assert not uses_vector_kernel(wide, "f16", 512, 1, HOPPER)  # eight heads share a KV head of 256
    assert uses_vector_kernel(replace(QWEN, kv_heads=32), "f16", 512, 1, AMPERE)  # nothing is shared


def test_parallel_blocks_are_those_of_the_occupancy_model() -> None:
    # Pinned to 3 and 2 blocks an SM on 26 SMs: the numbers worked out for the post's card.
    card = Card(900, 26, fit=(3, 2))
    on = Parts(frozenset(PARTS) - {"cuda-parallel-blocks", "guard"})
    found = predict_widths(QWEN, card, SETTINGS, 236, 318, [2, 3, 5, 9], on)["first_differing_kv_by_width"]
    model = VectorAttention(Gpu(26), heads=Heads(32, 8))
    assert (model.p(1, 512), model.p(2, 512)) == (4, 3)
    assert {w: found[str(w)] for w in (2, 3, 5)} == {2: 384, 3: None, 5: 256}
    assert found["2"] == model.first_differing_position(2) and found["5"] == model.first_differing_position(5)


def test_the_registers_of_this_card_decide_and_an_unknown_kernel_is_said_to_be() -> None:
    assert HOPPER.vector_blocks(128, 1, "f16") >= HOPPER.vector_blocks(128, 2, "f16") >= 1
    with pytest.raises(UserError, match="nothing is known of the vector attention kernel for sm_99"):
        Card(990, 10).vector_blocks(128, 1, "f16")
    with pytest.raises(UserError, match="q5_1 cache"):
        HOPPER.vector_blocks(128, 1, "q5_1")


def test_few_queries_fill_up_a_tile_so_that_ampere_is_exact_at_width_2() -> None:
    assert tensor_core_cuts(QWEN, 512, 1, 0, AMPERE) == tensor_core_cuts(QWEN, 512, 2, 1, AMPERE)
    assert tensor_core_cuts(QWEN, 512, 1, 0, AMPERE) != tensor_core_cuts(QWEN, 512, 3, 0, AMPERE)
    found = predict_widths(QWEN, AMPERE, SETTINGS, 300, 48, [2, 3, 4, 8])
    assert found["classes"] == [[1, 2], [3, 4], [8]]
    assert found["first_differing_width"] == 3


def test_a_long_range_is_cut_by_what_fits_on_the_card() -> None:
    wide = Shape(16, 2, 256, QWEN.kinds)
    short = [tensor_core_cuts(wide, 512, queries, 0, HOPPER) for queries in (1, 2)]
    long = [tensor_core_cuts(wide, 8192, queries, 0, HOPPER) for queries in (1, 2)]
    assert short[0] == short[1]
    assert len(long[0][1]) == 256 and len(long[1][1]) == 132  # two blocks an SM, one block an SM


def test_the_guard_cuts_a_pass_where_the_padded_range_grows() -> None:
    assert list(pieces(250, 9, guard=True)) == [(250, 6), (256, 3)]
    assert list(pieces(250, 9, guard=False)) == [(250, 9)]
    assert list(pieces(256, 4, guard=True)) == [(256, 4)]
    assert list(pieces(255, 1, guard=True)) == [(255, 1)]


def test_with_every_part_on_all_widths_are_one_class() -> None:
    for card in (AMPERE, HOPPER, LAPTOP):
        found = predict_widths(QWEN, card, SETTINGS, 236, 64, range(2, 17), Parts(frozenset(PARTS)))
        assert found["classes"] == [list(range(1, 17))]


def test_bf16_experts_differ_where_only_a_lone_token_fuses_them() -> None:
    experts = Shape(16, 4, 64, frozenset({("bf16", False, True), ("bf16", True, True), ("f32", False, True)}))
    treated = Parts(frozenset(PARTS), fused_experts=False)
    assert predict_widths(experts, HOPPER, SETTINGS, 40, 32, [2, 4], treated)["classes"] == [[1], [2, 4]]
    followed = replace(treated, fused_experts=True)
    assert predict_widths(experts, HOPPER, SETTINGS, 40, 32, [2, 4], followed)["classes"] == [[1, 2, 4]]
    halves = Shape(16, 4, 64, frozenset({("f16", False, True), ("f16", True, True), ("f32", False, True)}))
    assert predict_widths(halves, HOPPER, SETTINGS, 40, 32, [2, 4], treated)["classes"] == [[1, 2, 4]]


def test_a_models_shape_is_read_from_its_header(tiny_model: Any) -> None:
    header = read_header(tiny_model)
    shape = shape_of(header)
    assert (shape.heads, shape.kv_heads, shape.head, shape.group) == (4, 2, 64, 2)
    assert {kind for kind, _, _ in shape.kinds} <= {t.type.lower() for t in header.tensors}
    assert not any(expert for _, expert, _ in shape.kinds)
    windowed = replace(header, values={**header.values, "llama.attention.sliding_window": 64})
    with pytest.raises(UserError, match="no model of the CUDA dispatch for the attention of llama"):
        shape_of(windowed)


def test_predictions_for_a_gpu_say_why_there_are_none(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Card:
        raise UserError("no NVIDIA card can be asked what it is (NVMLError)")

    monkeypatch.setattr(predict, "card_here", absent)
    worker: Any = SimpleNamespace(build=SimpleNamespace(backend="cuda", description={}))
    model: Any = SimpleNamespace(path=tiny_model)
    settings = {**SETTINGS, "gpu_layers": 99, "threads": 1}
    found = predict.predict(worker, model, settings, 40, 16, [2, 4])
    assert (found["classes"], found["why"]) == ([], ["no NVIDIA card can be asked what it is (NVMLError)"])
    monkeypatch.setattr(predict, "card_here", lambda: HOPPER)
    assert predict.predict(worker, model, settings, 40, 16, [2, 4])["classes"] == [[1], [2, 4]]
    assert predict.predict(worker, model, settings, 40, 16, [2, 4], switch=16)["classes"] == [[1, 2, 4]]


@pytest.fixture(scope="module")
def scored() -> list[Scored]:
    folders = sorted(paths.receipts_dir().glob("h200-*"))
    found = [one for folder in folders for one in score_receipt(load_receipt(folder))]
    assert len(found) > 100
    return found


def test_no_measured_width_differs_before_or_without_a_prediction(scored: list[Scored]) -> None:
    assert [s.inputs for s in scored if s.early] == []


def test_classes_of_the_receipts_are_as_predicted_but_for_one_model(scored: list[Scored]) -> None:
    wrong = [s for s in scored if not s.right]
    # Heads of 256: other parts of the range, yet the same bits for 21 tokens, and so in both widths.
    assert {s.inputs["model"] for s in wrong} <= {"synthetic-gqa8-head256"}
    assert all(s.late for s in wrong)


def test_what_came_later_than_predicted_comes_from_attention_alone(scored: list[Scored]) -> None:
    late = [s for s in scored if s.late]
    # Where products differ, every row does; a few cells in a part of their own can leave every bit as it is.
    assert all("cuda-parallel-blocks" in s.inputs["build"] or "gqa8" in s.inputs["model"] for s in late)
    assert all(None not in s.late.values() for s in late)
