"""Every wrong model file gets one clear line, and no damaged header brings the parser down."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hiraishin.errors import UserError
from hiraishin.gguf_header import Header, read_header
from hiraishin.gguf_tables import GGML_TYPES, LANGUAGE_ARCHITECTURES, OTHER_ARCHITECTURES
from hiraishin.memory import memory_needed


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_header(path).check_language_model()
    text = str(caught.value)
    assert "\n" not in text
    assert path.name in text
    return text


def write(
    path: Path,
    arch: str = "llama",
    *,
    tensors: tuple[str, ...] = ("token_embd.weight",),
    vocabulary: int = 8,
    more: Callable[[Any], None] = lambda _: None,
) -> Path:
    """A small GGUF written by the gguf package, not by ours."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_context_length(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
    more(writer)
    for name in tensors:
        writer.add_tensor(name, np.zeros((vocabulary, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_written_by_the_gguf_package_is_read(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_head_count_kv([2, 1])
        writer.add_key_length(16)
        writer.add_chat_template("{{ messages }}")

    header = read_header(write(tmp_path / "m.gguf", more=more))
    header.check_language_model()
    assert (header.architecture, header.version, header.n_tensors) == ("llama", 3, 1)
    assert (header.n_layer, header.n_embd, header.n_vocab, header.n_ctx_train) == (2, 32, 8, 128)
    assert (header.n_head, header.n_head_kv, header.head_dim, header.head_dim_v) == (4, 2, 16, 8)
    assert header.has_chat_template
    assert header.types == {"F32": 1}
    assert header.weight_bytes == 8 * 32 * 4
    assert header.expected_size <= header.file_size


def test_the_tiny_model_agrees_with_the_gguf_package(tiny_model: Path) -> None:
    header, reader = read_header(tiny_model), gguf.GGUFReader(tiny_model)
    assert [(t.name, t.type, t.shape, t.size) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(int(n) for n in t.shape), int(t.n_bytes)) for t in reader.tensors
    ]
    assert header.data_start == reader.data_offset
    assert not header.has_chat_template
    assert header.expected_size == header.file_size == tiny_model.stat().st_size


def test_types_and_architectures_cover_those_of_the_gguf_package() -> None:
    ours = {name: (block, size) for name, block, size in GGML_TYPES.values()}
    theirs = {t.name: sizes for t, sizes in GGML_QUANT_SIZES.items() if t.name != "Q8_1"}
    assert theirs.items() <= ours.items()
    assert ours["Q8_1"] == (32, 36)  # two 16-bit numbers since ggml changed it; the gguf package counts two floats
    assert all(GGML_TYPES[t.value][0] == t.name for t in GGML_QUANT_SIZES)
    assert set(MODEL_ARCH_NAMES.values()) <= LANGUAGE_ARCHITECTURES | OTHER_ARCHITECTURES.keys()
    assert not LANGUAGE_ARCHITECTURES & OTHER_ARCHITECTURES.keys()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "there is no model file" in refused(tmp_path / "gone.gguf")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "is a folder" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty (0 bytes)"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "is a web page"),
        (b"\n  <html>sign in</html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "is a Git-LFS pointer"),
        (b"PK\x03\x04rest", "a zip archive"),
        (struct.pack("<Q", 300) + b'{"weight": 1', "a safetensors file"),
        (b"Entry not found", "something that begins with 'Entry not found'"),
        (b"ggml\x01\x00\x00\x00", "older than GGUF"),
        (b"GG", "is cut off inside its header, after 2 bytes"),
        (b"GGUF\x03\x00", "is cut off inside its header, after 6 bytes"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
    ],
)
def test_what_is_no_gguf_is_called_by_its_name(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert said in refused(path)


def test_a_file_cut_in_the_header_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    path, blob = tmp_path / "cut.gguf", tiny_model.read_bytes()
    start = read_header(tiny_model).data_start
    for size in (24, 100, 3000, start // 2, start - 40):
        path.write_bytes(blob[:size])
        assert "cut off inside its header" in refused(path)


def test_a_file_cut_at_half_is_refused_with_both_sizes(tmp_path: Path, tiny_model: Path) -> None:
    path, blob = tmp_path / "half.gguf", tiny_model.read_bytes()
    path.write_bytes(blob[: len(blob) // 2])
    assert f"it has {len(blob) // 2:,} bytes of {len(blob):,}" in refused(path)
    path.write_bytes(blob[:-1])
    assert "cut off" in refused(path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    assert "'hokage', which the pinned llama.cpp does not know" in refused(write(tmp_path / "m.gguf", "hokage"))


@pytest.mark.parametrize("arch", ["bert", "nomic-bert", "gemma-embedding", "t5encoder"])
def test_an_embedding_model_is_refused(tmp_path: Path, arch: str) -> None:
    assert "embedding model" in refused(write(tmp_path / "m.gguf", arch))


def test_a_language_model_made_for_pooling_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3", more=lambda w: w.add_pooling_type(gguf.PoolingType.LAST))
    assert "embedding model" in refused(path)


def test_a_draft_head_and_an_image_projector_are_refused(tmp_path: Path) -> None:
    assert "a draft head" in refused(write(tmp_path / "draft.gguf", "eagle3"))
    assert "the image part of a model" in refused(write(tmp_path / "mmproj.gguf", "clip"))


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds a vocabulary only" in refused(write(tmp_path / "vocab.gguf", tensors=()))


def test_a_file_without_embeddings_is_refused(tmp_path: Path) -> None:
    assert "lacks the token embeddings" in refused(write(tmp_path / "m.gguf", tensors=("output.weight",)))


def part(folder: Path, number: int, count: int = 2) -> Path:
    def more(writer: Any) -> None:
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)

    name = f"big-{number + 1:05d}-of-{count:05d}.gguf"
    return write(folder / name, tensors=("token_embd.weight",) if number == 0 else ("output.weight",), more=more)


def test_one_part_of_several_names_the_missing_ones(tmp_path: Path) -> None:
    first = part(tmp_path, 0, 3)
    assert "big-00002-of-00003.gguf, big-00003-of-00003.gguf" in refused(first)


def test_all_parts_together_are_accepted_through_the_first(tmp_path: Path) -> None:
    first, second = part(tmp_path, 0), part(tmp_path, 1)
    read_header(first).check_language_model()
    assert read_header(first).parts == [first, second]
    assert memory_needed(read_header(first), 256) >= 2 * 8 * 32 * 4
    assert "Give the first part, big-00001-of-00002.gguf" in refused(second)


def test_a_part_that_was_cut_is_found_from_the_first(tmp_path: Path) -> None:
    first, second = part(tmp_path, 0), part(tmp_path, 1)
    second.write_bytes(second.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"big-00002-of-00002\.gguf is cut off"):
        read_header(first).check_language_model()


def test_a_renamed_part_is_told_what_names_llama_cpp_expects(tmp_path: Path) -> None:
    renamed = part(tmp_path, 0).rename(tmp_path / "mine.gguf")
    assert "-00001-of-00002.gguf" in refused(renamed)


def test_lengths_that_no_file_could_hold_are_refused_without_allocating(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = struct.pack("<Q", 5) + b"a.key"
    for body in (
        struct.pack("<Q", 1 << 62),
        key + struct.pack("<IQ", 8, 1 << 62),
        key + struct.pack("<IIQ", 9, 8, 1 << 62),
        key + struct.pack("<IIQ", 9, 8, 1 << 20),
        key + struct.pack("<IIQ", 9, 4, 1 << 62),
        key + struct.pack("<IIQ", 9, 9, 1),
        key + struct.pack("<I", 99),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body)
        refused(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    assert "damaged" in refused(path)


def test_many_strings_in_a_sparse_file_are_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    key = struct.pack("<Q", 5) + b"a.key"
    with path.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 8, 1 << 30))
        stream.truncate(1 << 34)
    assert "damaged" in refused(path)


def test_a_header_longer_than_the_first_look_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "long.gguf", more=lambda w: w.add_chat_template("x" * 3_000_000), vocabulary=90_000)
    header = read_header(path)
    header.check_language_model()
    assert header.n_vocab == 90_000
    assert header.has_chat_template


def used(header: Header) -> None:
    """Everything that other modules ask of a header."""
    header.check_language_model()
    memory_needed(header, 4096)
    assert header.expected_size <= header.file_size
    assert header.types


EXTREMES = st.sampled_from(
    [0, 1, 2, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mutation_of_a_header_parses_or_is_refused(tmp_path: Path, tiny_model: Path, data: st.DataObject) -> None:
    blob = bytearray(tiny_model.read_bytes())
    # The metadata before the vocabulary and the tensor table are where lengths and types sit.
    tokens, start = blob.index(b"tokenizer.ggml.tokens"), read_header(tiny_model).data_start
    places = st.one_of(st.integers(0, tokens + 60), st.integers(start - 1400, start - 1), st.integers(0, start - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(places)
        match data.draw(st.integers(0, 4)):
            case 0:
                blob[at] ^= 1 << data.draw(st.integers(0, 7))
            case 1:
                blob[at : at + 8] = struct.pack("<Q", data.draw(EXTREMES))
            case 2:
                blob[at : at + 4] = struct.pack("<I", data.draw(EXTREMES) & 0xFFFFFFFF)
            case 3:
                blob[at:at] = data.draw(st.binary(max_size=16))
            case _:
                del blob[at : at + data.draw(st.integers(1, 64))]
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob))) :]
    path = tmp_path / "mutated.gguf"
    path.write_bytes(blob)
    try:
        used(read_header(path))
    except UserError as error:
        assert "\n" not in str(error)


@given(content=st.binary(max_size=400))
@example(content=b"GGUF\x03\x00\x00\x00" + bytes(16))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_behind_a_valid_start_parse_or_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random.gguf"
    for prefix in (b"", b"GGUF\x03\x00\x00\x00", b"GGUF" + struct.pack("<IQQ", 3, 1, 1)):
        path.write_bytes(prefix + content)
        with pytest.raises(UserError):
            used(read_header(path))
