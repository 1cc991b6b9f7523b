"""Synthetic models have the right shapes, types and spread, the same bytes every time, and llama.cpp loads them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from hiraishin import gguf_blocks, synthetic
from hiraishin.errors import UserError
from hiraishin.gguf_header import read_header
from hiraishin.synthetic import SHAPES, make_shape

TINY_SHA256 = "68664a8c37c22eb1c28807517869c88f09a6675872afdc6819e7961ca316c108"


def quiet(_: str) -> None:
    pass


def floats(name: str, blocks: gguf_blocks.Bytes) -> gguf_blocks.Floats:
    """Dequantize with the gguf package; the two types it does not know by their definition in ggml."""
    if name in ("F32", "F16"):
        return blocks.reshape(-1).view({"F32": np.float32, "F16": np.float16}[name]).astype(np.float32)
    if name in ("Q1_0", "Q2_0"):
        d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        if name == "Q1_0":
            codes = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        else:
            pairs = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
            codes = pairs.reshape(len(blocks), -1).astype(np.float32) - 1
        return np.asarray(d * codes, np.float32)
    return np.asarray(dequantize(blocks, GGMLQuantizationType[name]), np.float32)


@pytest.mark.parametrize("name", gguf_blocks.TYPES)
def test_every_bank_has_mean_zero_and_the_wanted_spread(name: str) -> None:
    weights, size = gguf_blocks.block_of(name)
    blocks = gguf_blocks.bank(name, max(500, 100_000 // weights), 1 / 16, seed=7)
    assert blocks.shape[1] == size
    values = floats(name, blocks)
    assert np.isfinite(values).all()
    assert abs(float(values.mean())) < 0.02 / 16
    assert 0.88 < float(values.std()) * 16 < 1.12
    assert np.array_equal(blocks, gguf_blocks.bank(name, len(blocks), 1 / 16, seed=7))
    assert not np.array_equal(blocks, gguf_blocks.bank(name, len(blocks), 1 / 16, seed=8))
    if weights > 1:
        assert len(np.unique(blocks, axis=0)) == len(blocks)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Q2_K", 0.36),
        ("Q3_K", 0.22),
        ("Q4_K", 0.09),
        ("Q5_K", 0.045),
        ("Q6_K", 0.025),
        ("IQ4_NL", 0.1),
        ("BF16", 0.004),
    ],
)
def test_own_quantizers_stay_close_to_what_they_were_given(name: str, error: float) -> None:
    weights = gguf_blocks.block_of(name)[0]
    values = gguf_blocks.normal(400 * 256, seed=3).reshape(-1, weights)
    back = floats(name, gguf_blocks.quantize(name, values)).reshape(values.shape)
    assert float(np.sqrt(np.mean((back - values) ** 2))) < error


def test_blocks_of_zeros_quantize_to_zeros() -> None:
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"):
        zeros = np.zeros((2, gguf_blocks.block_of(name)[0]), np.float32)
        assert not floats(name, gguf_blocks.quantize(name, zeros)).any()


def test_rescaling_a_bank_scales_its_weights() -> None:
    bank = gguf_blocks.bank("Q4_K", 50, 1.0, seed=1)
    smaller = gguf_blocks.rescale("Q4_K", bank, 1 / 64)
    assert smaller is not None
    assert np.allclose(floats("Q4_K", smaller) * 64, floats("Q4_K", bank), rtol=0, atol=0.02)
    assert gguf_blocks.rescale("IQ2_S", bank, 0.5) is None


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)
    made = gguf_blocks.quantize("BF16", bits.view(np.float32).reshape(-1, 1)).view(np.uint16).reshape(-1)
    assert made.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


def test_the_same_bytes_come_out_every_time(home: Path, tiny_model: Path) -> None:
    (home / "models").unlink(missing_ok=True)
    again = make_shape("tiny", "Q4_K_M", echo=quiet)
    assert again != tiny_model
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (again, tiny_model)}
    assert digests == {TINY_SHA256}


def test_a_finished_file_is_not_written_again(home: Path) -> None:
    (home / "models").unlink(missing_ok=True)
    said: list[str] = []
    first = make_shape("tiny", "Q8_0", echo=said.append)
    inode = first.stat().st_ino
    assert make_shape("tiny", "Q8_0", echo=said.append).stat().st_ino == inode
    assert len(said) == 1
    assert "synthetic" in said[0]


def test_a_cut_file_or_one_of_another_recipe_is_made_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models").unlink(missing_ok=True)
    path = make_shape("tiny", echo=quiet)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert make_shape("tiny", echo=quiet).read_bytes() == whole
    monkeypatch.setattr(synthetic, "RECIPE", synthetic.RECIPE + 1)
    said: list[str] = []
    make_shape("tiny", echo=said.append)
    assert said


def test_no_two_rows_of_a_matrix_are_alike(tiny_model: Path) -> None:
    for tensor in gguf.GGUFReader(tiny_model).tensors:
        if len(tensor.shape) == 2:
            rows = np.asarray(tensor.data).reshape(int(tensor.shape[1]), -1)
            assert len(np.unique(rows, axis=0)) == len(rows), tensor.name


def test_rows_stay_distinct_in_the_largest_shape() -> None:
    shape = SHAPES["qwen3-8b"]
    prime = synthetic._next_prime(shape.vocab)
    for inputs in (shape.hidden, shape.ffn):
        for weights in (256, 32):
            starts = np.arange(shape.vocab, dtype=np.int64) * (inputs // weights) % prime
            assert len(np.unique(starts)) == shape.vocab


def test_the_8b_shape_has_the_tensors_and_mix_that_llama_cpp_chooses() -> None:
    plans = {p.name: p for p in synthetic._plans(SHAPES["qwen3-8b"], "Q4_K_M")}
    assert len(plans) == 399
    counts = {t: sum(p.type == t for p in plans.values()) for t in ("F32", "Q4_K", "Q6_K")}
    assert counts == {"F32": 145, "Q4_K": 217, "Q6_K": 37}
    assert plans["token_embd.weight"].type == "Q4_K"
    assert plans["output.weight"].type == "Q6_K"
    assert plans["blk.0.ffn_down.weight"].shape == (12288, 4096)
    assert plans["blk.0.attn_k.weight"].shape == (4096, 1024)
    more = [i for i in range(36) if plans[f"blk.{i}.attn_v.weight"].type == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    assert more == [i for i in range(36) if plans[f"blk.{i}.ffn_down.weight"].type == "Q6_K"]
    assert 5.02e9 < sum(p.size for p in plans.values()) < 5.03e9


def test_one_type_throughout_means_every_matrix() -> None:
    for shape, quant in (("qwen3-8b", "Q6_K"), ("small", "IQ2_XXS"), ("gqa8-head256", "BF16"), ("moe-small", "Q8_0")):
        types = {
            p.type for p in synthetic._plans(SHAPES[shape], quant) if len(p.shape) > 1 and "gate_inp" not in p.name
        }
        assert types == {quant}


def test_a_tied_model_has_no_output_matrix_and_keeps_its_embedding_in_more_bits() -> None:
    plans = {p.name: p for p in synthetic._plans(SHAPES["qwen3-0.6b"], "Q4_K_M")}
    assert "output.weight" not in plans
    assert plans["token_embd.weight"].type == "Q6_K"


def test_unknown_shapes_and_quants_are_named_with_the_known_ones(home: Path) -> None:
    with pytest.raises(UserError, match=r"no synthetic shape 'qwen9'. Known: qwen3-8b"):
        make_shape("qwen9", echo=quiet)
    with pytest.raises(UserError, match=r"cannot have the quant 'Q9'"):
        make_shape("tiny", "Q9", echo=quiet)


def test_a_full_disk_is_refused_before_writing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models").unlink(missing_ok=True)
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"needs 5\.03 GB and 0\.00 GB are free"):
        make_shape("qwen3-8b", echo=quiet)
    assert [p for p in (home / "models").iterdir() if p.is_file()] == []


def test_every_model_says_that_it_is_synthetic(tiny_model: Path) -> None:
    header = read_header(tiny_model)
    assert header.values["general.name"] == "synthetic-tiny"
    assert "they mean nothing" in str(header.values["general.description"])
    assert tiny_model.name.startswith("synthetic-")


DECODE = [
    *[(shape, "Q4_K_M") for shape in ("tiny", "tiny-moe", "tiny-swa", "tiny-recurrent", "gqa8-head256", "moe-small")],
    *[("tiny", quant) for quant in ("Q5_K_M", "Q6_K", "F16", "F32", "BF16")],
    *[("small", quant) for quant in gguf_blocks.TYPES if quant not in ("F32", "F16", "BF16")],
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A child on the stock build, and a models folder that lives as long as this module."""
    from hiraishin.builds import find_build
    from hiraishin.worker import Worker

    try:
        build = find_build("stock")
    except UserError as missing:
        pytest.skip(str(missing))
    with Worker(build) as worker:
        yield worker, tmp_path_factory.mktemp("shapes")


@pytest.mark.real_model
@pytest.mark.parametrize(("shape", "quant"), DECODE)
def test_llama_cpp_loads_and_decodes_it(decoder: Any, monkeypatch: pytest.MonkeyPatch, shape: str, quant: str) -> None:
    worker, folder = decoder
    monkeypatch.setenv("HIRAISHIN_HOME", str(folder))
    path = make_shape(shape, quant, echo=quiet)
    try:
        events = worker.call(
            "hiraishin.replay:measure",
            model_path=str(path),
            settings={"threads": 1, "flash_attn": True, "kv_type": "f16"},
            switch=0,
            parts_off=0,
            prompt=[1, 75, 104, 111],
            tokens=4,
            widths=[],
            rerun=False,
        )
        records = [event["record"] for event in events if event.get("kind") == "trace"]
    finally:
        path.unlink()
    assert len(records) == 1
    assert len(records[0]["tokens"]) == 4
