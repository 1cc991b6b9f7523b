"""Finding, describing and refusing native builds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hiraishin import builds, paths
from hiraishin.builds import Build, binding_functions, describe_library, find_build
from hiraishin.errors import UserError
from hiraishin.native.compile import recipe
from hiraishin.native.fetch import pins

DESCRIPTION: dict[str, Any] = {
    "schema": 1,
    "name": "patched",
    "backend": "cpu",
    "upstream_commit": "0c1e57098",
    "source": {"kind": "pinned", "tree_sha256": "a" * 64, "origin": None},
    "patches": [
        {"name": "0001.patch", "sha256": "b" * 64, "compiled": True},
        {"name": "0002.patch", "sha256": "c" * 64, "compiled": True},
    ],
    "compiler": {"c++": "g++ 12.2.0", "cc": "gcc 12.2.0"},
    "flags": ["-DCMAKE_BUILD_TYPE=Release"],
    "cpu": {"features": ["pni"], "march": "znver3"},
    "gpu_arch": None,
    "libraries": {"libllama.so": "d" * 64},
    "tools": [],
}


def compiled(folder: Path, name: str, code: str, *flags: str) -> Path:
    """A shared library from a line of C."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{name}.so", *flags]
    subprocess.run(command, input=code, text=True, check=True)
    return path


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose libllama has every function that the binding declares (and none that works)."""
    folder = tmp_path_factory.mktemp("libraries with space")
    for name in ("libggml-base", "libggml"):
        compiled(folder, name, f"int {name.replace('-', '_')}(void) {{ return 0; }}")
    compiled(folder, "libllama", "".join(f"void {name}(void) {{}}\n" for name in binding_functions()))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "copy", symlinks=True))


def finished(folder: Path, **changes: Any) -> Path:
    """A folder that looks like what build.sh leaves."""
    folder.mkdir(parents=True)
    (folder / "libllama.so").write_bytes(b"")
    (folder / "abi.json").write_text('{"structs": {"llama_batch": {"size": 56, "fields": {}}}}', encoding="utf-8")
    (folder / "build.json").write_text(json.dumps(DESCRIPTION | changes), encoding="utf-8")
    return folder


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_missing_build_names_the_command_that_makes_it(empty_home: Path) -> None:
    with pytest.raises(UserError, match=r"\./build\.sh patched") as caught:
        find_build("patched")
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=r"\./build\.sh stock --backend cuda"):
        find_build("stock", "cuda")


@pytest.mark.parametrize("spoil", ["build.json", "abi.json", "libllama.so"])
def test_a_build_that_is_not_whole_is_not_believed(empty_home: Path, spoil: str) -> None:
    made = finished(empty_home / "builds" / "cpu" / "patched")
    (made / spoil).unlink()
    with pytest.raises(UserError, match="not whole"):
        find_build("patched")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"libraries": 3}', '{"libraries": {}}'])
def test_a_damaged_description_is_not_believed(empty_home: Path, text: str) -> None:
    made = finished(empty_home / "builds" / "cpu" / "patched")
    (made / "build.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="not whole"):
        find_build("patched")


def test_a_finished_build_is_found_with_its_layout(empty_home: Path) -> None:
    made = finished(empty_home / "builds" / "cpu" / "patched")
    found = find_build("patched")
    assert (found.name, found.backend, found.lib_dir) == ("patched", "cpu", made)
    assert found.abi["structs"]["llama_batch"]["size"] == 56


def test_a_build_for_another_processor_is_refused_before_it_crashes(empty_home: Path) -> None:
    finished(empty_home / "builds" / "cpu" / "patched", cpu={"features": ["pni", "avx9000"]})
    if not builds._cpu_features():
        pytest.skip("this system does not tell what its processor can do")
    with pytest.raises(UserError, match=r"lacks: avx9000"):
        find_build("patched")


def fingerprint(**changes: Any) -> str:
    return Build("x", "cpu", Path("/anywhere"), DESCRIPTION | changes, {}).fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"source": {"kind": "pinned", "tree_sha256": "e" * 64, "origin": None}},
        {"patches": DESCRIPTION["patches"][:1]},
        {"patches": DESCRIPTION["patches"][::-1]},
        {"compiler": {"c++": "g++ 13.1.0", "cc": "gcc 13.1.0"}},
        {"flags": ["-DCMAKE_BUILD_TYPE=Debug"]},
        {"cpu": {"features": ["pni", "avx2"], "march": "znver3"}},
        {"cpu": {"features": ["pni"], "march": "znver4"}},
        {"gpu_arch": "90"},
        {"backend": "cuda"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_decides_the_bits_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) != fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"patches": [*DESCRIPTION["patches"], {"name": "0101-cuda.patch", "sha256": "f" * 64, "compiled": False}]},
        {"source": {"kind": "folder", "tree_sha256": "a" * 64, "origin": "/somewhere/else"}},
        {"patches": [patch | {"name": f"renamed-{n}"} for n, patch in enumerate(DESCRIPTION["patches"])]},
        {"libraries": {"libllama.so": "0" * 64}},
        {"tools": ["llama-bench"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_decide_the_bits_leaves_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) == fingerprint()


def test_a_library_built_elsewhere_is_known_by_its_bytes(folder: Path) -> None:
    first = describe_library(folder)
    assert (first.name, first.backend, first.abi) == ("copy", "cpu", {})
    renamed = folder.rename(folder.with_name("other"))
    assert describe_library(renamed).fingerprint == first.fingerprint
    compiled(renamed, "libggml", "int another(void) { return 1; }")
    assert describe_library(renamed).fingerprint != first.fingerprint


def test_relative_paths_trailing_slashes_and_spaces_are_fine(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    for given in (str(whole), f"{whole}/", whole.name, f"./{whole.name}/"):
        assert describe_library(given).lib_dir == whole


def test_a_folder_that_is_none_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "empty": "is empty",
        folder / "libllama.so": "is a file",
    }
    for path, said in cases.items():
        with pytest.raises(UserError, match=said) as caught:
            describe_library(path)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("library", ["libllama", "libggml", "libggml-base"])
def test_a_folder_without_one_of_the_libraries_is_refused(folder: Path, library: str) -> None:
    (folder / f"{library}.so").unlink()
    with pytest.raises(UserError, match=rf"has no {library}\.so"):
        describe_library(folder)


def test_a_library_that_lacks_a_function_is_refused(folder: Path) -> None:
    names = [name for name in binding_functions() if name != "llama_decode"]
    compiled(folder, "libllama", "".join(f"void {name}(void) {{}}\n" for name in names))
    with pytest.raises(UserError, match=r"lacks llama_decode"):
        describe_library(folder)


def test_a_library_without_what_it_depends_on_is_refused(folder: Path) -> None:
    compiled(folder, "libgone", "int gone(void) { return 0; }")
    code = "int gone(void); int here(void) { return gone(); }\n"
    compiled(folder, "libllama", code, f"-L{folder}", "-lgone", "-Wl,-rpath,$ORIGIN")
    (folder / "libgone.so").unlink()
    with pytest.raises(UserError, match=r"cannot be loaded: .*libgone\.so"):
        describe_library(folder)


@pytest.mark.parametrize(
    ("needs", "said"), [("libcuda", "NVIDIA driver"), ("libcublasLt", "CUDA's"), ("libother", "in its folder")]
)
def test_a_cuda_library_without_its_driver_says_what_is_missing(folder: Path, needs: str, said: str) -> None:
    # A library of that name that the linker finds and the loader does not, as on a machine without a driver.
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / f"{needs}.so"), f"-Wl,-soname,{needs}.so.1"]
    subprocess.run(command, input="int cuInit(void) { return 0; }", text=True, check=True)
    code = "int cuInit(void); int here(void) { return cuInit(); }\n"
    compiled(folder, "libggml-cuda", code, f"-L{folder}", f"-l{needs[3:]}", "-Wl,-rpath,$ORIGIN")
    (folder / f"{needs}.so").unlink()
    functions = "".join(f"void {name}(void) {{}}\n" for name in binding_functions())
    code = "int here(void); int there(void) { return here(); }\n" + functions
    compiled(
        folder, "libllama", code, f"-L{folder}", "-lggml-cuda", "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"
    )
    with pytest.raises(UserError, match=rf"cannot be loaded: {needs}\.so\.1: .*{said}") as caught:
        describe_library(folder)
    assert (len(str(caught.value).splitlines()), caught.value.exit_code) == (1, 2)


def test_a_file_that_is_no_library_is_refused(folder: Path) -> None:
    (folder / "libllama.so").write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match="cannot be loaded"):
        describe_library(folder)


def test_a_library_that_crashes_when_loaded_is_refused(folder: Path) -> None:
    code = "#include <signal.h>\n__attribute__((constructor)) static void crash(void) { raise(SIGILL); }\n"
    compiled(folder, "libllama", code)
    with pytest.raises(UserError, match="crashes when it is loaded"):
        describe_library(folder)


def test_nothing_is_loaded_into_this_process(whole: Path) -> None:
    describe_library(whole)
    assert str(whole) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_importing_this_module_imports_nothing_heavy() -> None:
    code = "import sys, hiraishin.builds; print(sorted({m.split('.')[0] for m in sys.modules}))"
    variables = os.environ | {"PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert not {"numpy", "pandas", "pydantic", "llama_cpp", "gguf", "matplotlib"} & set(
        json.loads(done.stdout.replace("'", '"'))
    )


@pytest.fixture(scope="module")
def real_builds() -> None:
    builds.ensure_builds("cpu", echo=lambda _: None)


@pytest.mark.real_model
@pytest.mark.usefixtures("real_builds")
@pytest.mark.parametrize("name", ["stock", "patched"])
def test_the_builds_say_what_they_are_made_from(name: str) -> None:
    found = find_build(name)
    described = found.description
    assert described["name"] == name
    assert described["source"]["tree_sha256"] == pins()["llama_cpp"]["tree_sha256"]
    assert described["upstream_commit"] == pins()["llama_cpp"]["commit"]
    series = [
        line for line in (paths.ROOT / "patches" / "series").read_text(encoding="utf-8").split("\n") if line.strip()
    ]
    listed = [line.partition("#")[0].strip() for line in series if line.partition("#")[0].strip()]
    assert [patch["name"] for patch in described["patches"]] == (listed if name == "patched" else [])
    assert describe_library(found.lib_dir).fingerprint == found.fingerprint


@pytest.mark.real_model
@pytest.mark.usefixtures("real_builds")
def test_stock_and_patched_differ_in_their_patches_alone() -> None:
    stock, patched = (recipe(find_build(name).description) for name in ("stock", "patched"))
    assert stock.pop("patches") == []
    assert patched.pop("patches")
    assert stock == patched


@pytest.mark.real_model
@pytest.mark.usefixtures("real_builds")
def test_the_builds_own_headers_agree_with_the_binding() -> None:
    from hiraishin.worker import Worker

    with Worker(find_build("stock")) as worker:  # refuses at the start when a struct differs
        assert {name.partition(".so")[0] for name in worker.libraries} >= {"libllama", "libggml", "libggml-base"}


@pytest.mark.real_model
@pytest.mark.usefixtures("real_builds")
def test_a_second_call_of_ensure_builds_builds_nothing() -> None:
    lines: list[str] = []
    builds.ensure_builds("cpu", echo=lines.append)
    assert sum("up to date" in line for line in lines) == 2, lines
