"""build.sh --backend cuda with a toolkit that has no cuBLAS, and the operator cases that come with --tools."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from native_fakes import PATCH, fake_llama, fake_repository, run_build, write

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native import cublas, tools
from hiraishin.native.compile import Request, build
from hiraishin.native.tools import Tool


def compiler(folder: Path, *, has_cublas: bool) -> Tool:
    """An nvcc of version 13.0 that preprocesses anything, or anything but a file that asks for cuBLAS."""
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    refuse = "" if has_cublas else 'grep -q cublas_v2.h "$2" && exit 1; '
    path.write_text(f"#!/bin/sh\n{refuse}exit 0\n", encoding="utf-8")
    path.chmod(0o755)
    return Tool("nvcc", str(path), (13, 0), "Cuda compilation tools, release 13.0, V13.0.88")


def package(site: Path, *, name: str = "cu13", major: int = 13) -> Path:
    """A Python package of cuBLAS below ``site``, beside headers of the run time."""
    files = {f"nvidia/{name}/include/{header}": "" for header in ("cublas_v2.h", "cublas_api.h", "cuda_runtime.h")}
    files |= {f"nvidia/{name}/lib/lib{library}.so.{major}": "" for library in ("cublas", "cublasLt")}
    write(site, files)
    return site / "nvidia" / name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cublas, "_site_folders", lambda: [tmp_path / "nothing here", tmp_path / "site"])
    return tmp_path / "site"


def test_a_toolkit_with_cublas_is_left_alone(tmp_path: Path, site: Path) -> None:
    package(site)
    assert cublas.options(compiler(tmp_path / "cuda", has_cublas=True), tmp_path / "links") == []
    assert not (tmp_path / "links").exists()


@pytest.mark.parametrize("name", ["cu13", "cublas"])
def test_the_package_lends_its_libraries_and_no_other_header(tmp_path: Path, site: Path, name: str) -> None:
    lent = package(site, name=name)
    links = tmp_path / "links"
    for _ in range(2):  # a second call finds the folder there
        given = cublas.options(compiler(tmp_path / f"cuda{_}", has_cublas=False), links)
    assert given == [
        f'-DCMAKE_CUDA_FLAGS=-I"{links}"',
        f"-DCUDA_cublas_LIBRARY={lent / 'lib' / 'libcublas.so.13'}",
        f"-DCUDA_cublasLt_LIBRARY={lent / 'lib' / 'libcublasLt.so.13'}",
    ]
    assert sorted(path.name for path in links.iterdir()) == ["cublas_api.h", "cublas_v2.h"]
    assert (links / "cublas_v2.h").resolve() == lent / "include" / "cublas_v2.h"


def test_cmake_finds_the_lent_headers_in_a_folder_with_a_space(tmp_path: Path, site: Path) -> None:
    """With the C++ compiler in nvcc's place: CMake treats the flags of all languages alike."""
    package(site)
    given = cublas.options(compiler(tmp_path / "cuda", has_cublas=False), tmp_path / "a folder" / "links")
    flags = given[0].replace("CUDA_FLAGS", "CXX_FLAGS")
    lists = "cmake_minimum_required(VERSION 3.18)\nproject(lent CXX)\nadd_library(lent STATIC lent.cpp)\n"
    write(tmp_path / "project", {"CMakeLists.txt": lists, "lent.cpp": "#include <cublas_v2.h>\n"})
    cmake, ninja, cxx = (tools.need(name).path for name in ("cmake", "ninja", "c++"))
    where = ["-S", str(tmp_path / "project"), "-B", str(tmp_path / "made"), "-G", "Ninja"]
    told = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_CXX_COMPILER={cxx}", flags]
    subprocess.run([cmake, *where, *told], check=True, capture_output=True)
    subprocess.run([cmake, "--build", str(tmp_path / "made")], check=True, capture_output=True)


@pytest.mark.parametrize("major", [None, 12])
def test_no_cublas_or_one_of_another_version_is_one_line_with_its_package(
    tmp_path: Path, site: Path, major: int | None
) -> None:
    if major:
        package(site, name="cublas", major=major)
    with pytest.raises(UserError) as error:
        cublas.options(compiler(tmp_path / "cuda", has_cublas=False), tmp_path / "links")
    assert "has no cuBLAS" in error.value.what and "libcublas-dev-13-0" in error.value.hint


def test_the_pythons_at_hand_say_where_they_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"python3": "#!/bin/sh\necho '[\"/place of/packages\"]'\n"})
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = cublas._site_folders()
    assert found[0] == Path("/place of/packages") and len(found) > 1


def test_build_sh_names_what_is_missing_before_it_configures(tmp_path: Path) -> None:
    nvcc = tmp_path / "cuda" / "nvcc"
    write(
        tmp_path,
        {"cuda/nvcc": '#!/bin/sh\n[ "$1" = --version ] && echo "release 99.1, V99.1.1"\n[ "$1" != -E ]\n'},
    )
    nvcc.chmod(0o755)
    repository = fake_repository(tmp_path / "repository")
    llama = fake_llama(tmp_path / "llama.cpp")
    done = run_build(repository, "--backend", "cuda", "--arch", "90", "--source", str(llama), CUDACXX=str(nvcc))
    assert done.returncode == 2
    assert f"{nvcc} has no cuBLAS" in done.stderr and "libcublas-dev-99-1" in done.stderr


def test_operator_cases_come_with_tools_and_leave_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = "--- /dev/null\n+++ b/tests/test-backend-ops.cpp\n@@ -0,0 +1 @@\n+// cases\n"
    repository = fake_repository(tmp_path / "repository", {"0001-two.patch": PATCH})
    write(repository, {"patches/tests/0201-cases.patch": cases, "patches/tests/0301-fault.patch": PATCH})
    monkeypatch.setattr(paths, "ROOT", repository)
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        "hiraishin.native.compile._one",
        lambda request, place, name, origin, patches: asked.append((name, [p.name for p in patches])),
    )
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    llama = fake_llama(tmp_path / "llama.cpp")
    build(Request(source=llama))
    build(Request(source=llama, tools=True))
    assert asked == [
        ("stock", []),
        ("patched", ["0001-two.patch"]),
        ("stock", []),
        ("patched", ["0001-two.patch", "tests/0201-cases.patch"]),
    ]


def test_a_later_call_without_tools_keeps_the_cases_that_the_tools_have(tmp_path: Path) -> None:
    cases = "--- /dev/null\n+++ b/tests/test-backend-ops.cpp\n@@ -0,0 +1 @@\n+// cases\n"
    repository = fake_repository(tmp_path / "repository")
    write(repository, {"patches/tests/0201-cases.patch": cases})
    llama = fake_llama(tmp_path / "llama.cpp")
    assert run_build(repository, "--source", str(llama)).returncode == 0
    folder = repository / "home" / "builds" / "cpu" / "patched"
    described = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    assert [patch["name"] for patch in described["patches"]] == ["0001-two.patch"]
    (folder / "llama-bench").write_text("", encoding="utf-8")
    described["tools"] = ["llama-bench"]
    (folder / "build.json").write_text(json.dumps(described), encoding="utf-8")
    again = run_build(repository, "--source", str(llama))
    assert again.stdout.count("up to date") == 2, again.stdout + again.stderr
    described = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    assert [(patch["name"], patch["compiled"]) for patch in described["patches"]] == [
        ("0001-two.patch", True),
        ("tests/0201-cases.patch", False),
    ]
