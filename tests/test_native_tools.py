"""build.sh --tools: what llama.cpp's own programs need from the source, which the library alone does not."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path

import pytest

from hiraishin import paths
from hiraishin.native import source
from hiraishin.native.fetch import pins

REAL_SOURCES = paths.ROOT / ".hiraishin" / "sources"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of sources but for the pinned package, if an earlier build has fetched it."""
    package = REAL_SOURCES / f"llama_cpp_python-{pins()['llama_cpp_python']['version']}.tar.gz"
    if not package.is_file():
        pytest.skip("the pinned source package has not been fetched yet")
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path))
    paths.sources_dir().mkdir(parents=True)
    shutil.copyfile(package, paths.sources_dir() / package.name)
    return paths.sources_dir()


def test_every_script_that_a_build_of_the_tools_runs_is_unpacked(sources: Path) -> None:
    tree = source.pinned().tree
    named = {
        script
        for file in (tree / "tools").rglob("CMakeLists.txt")
        for script in re.findall(r"\$\{PROJECT_SOURCE_DIR\}/(\S+\.cmake)", file.read_text(encoding="utf-8"))
    }
    assert "scripts/ui-assets.cmake" in named  # llama-server's, without which it cannot be built
    assert [script for script in sorted(named) if not (tree / script).is_file()] == []


def test_a_source_unpacked_without_a_folder_that_counts_is_unpacked_again(sources: Path) -> None:
    tree = source.pinned().tree
    before = source.tree_sha256(tree)
    shutil.rmtree(tree / "scripts")
    assert source.tree_sha256(tree) == before == pins()["llama_cpp"]["tree_sha256"]
    assert (source.pinned().tree / "scripts" / "ui-assets.cmake").is_file()


def test_a_source_that_is_complete_is_left_alone(sources: Path) -> None:
    tree = source.pinned().tree
    (tree / "mark").touch()
    assert (source.pinned().tree / "mark").exists()
    with tarfile.open(next(sources.glob("*.tar.gz"))) as package:
        assert any(name.endswith("/scripts/ui-assets.cmake") for name in package.getnames())
