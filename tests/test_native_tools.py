"""build.sh --tools: what llama.cpp's own programs need from the source, which the library alone does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiraishin import paths
from hiraishin.native import source
from hiraishin.native.fetch import pins

REAL_SOURCES = paths.ROOT / ".hiraishin" / "sources"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The pinned source, unpacked into a folder of its own; its package must have been fetched by an earlier build."""
    package = REAL_SOURCES / f"llama_cpp_python-{pins()['llama_cpp_python']['version']}.tar.gz"
    if not package.is_file():
        pytest.skip("the pinned source package has not been fetched yet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIRAISHIN_HOME", str(tmp_path_factory.mktemp("home")))
        paths.sources_dir().mkdir(parents=True)
        shutil.copyfile(package, paths.sources_dir() / package.name)
        yield source.pinned().tree


def test_every_script_that_a_build_of_the_tools_runs_is_unpacked(tree: Path) -> None:
    named = {
        script
        for file in (tree / "tools").rglob("CMakeLists.txt")
        for script in re.findall(r"\$\{PROJECT_SOURCE_DIR\}/(\S+\.cmake)", file.read_text(encoding="utf-8"))
    }
    assert "scripts/ui-assets.cmake" in named  # llama-server's, without which it cannot be built
    assert [script for script in sorted(named) if not (tree / script).is_file()] == []


def test_a_source_unpacked_without_a_folder_that_counts_is_unpacked_again_and_a_whole_one_is_not(tree: Path) -> None:
    (tree / "mark").touch()
    assert (source.pinned().tree / "mark").exists()
    shutil.rmtree(tree / "scripts")
    assert source.tree_sha256(tree) == pins()["llama_cpp"]["tree_sha256"]  # the library does not need them
    assert (source.pinned().tree / "scripts" / "ui-assets.cmake").is_file()
    assert not (tree / "mark").exists()
