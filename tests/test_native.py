"""build.sh: what it makes, what it leaves alone, what it says when it cannot, and what a kill leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from native_fakes import PATCH, build_environment, fake_llama, fake_repository, run_build, value_of, write

from hiraishin.errors import UserError
from hiraishin.native import fetch, tools
from hiraishin.native.compile import CPU_FEATURES


def stamps(folder: Path) -> dict[str, int]:
    """Every file's time stamp."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return fake_llama(tmp_path / "llama.cpp")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return fake_repository(tmp_path / "repository")


def builds(repository: Path) -> Path:
    return repository / "home" / "builds" / "cpu"


@pytest.mark.parametrize("place", ["plain", "with space", "a{b}c", "ünï-雷"])
def test_both_builds_come_out_of_any_folder(tmp_path: Path, place: str) -> None:
    llama = fake_llama(tmp_path / place / "llama.cpp")
    repository = fake_repository(tmp_path / place / "repository")
    done = run_build(repository, "all", "--source", str(llama))
    assert done.returncode == 0, done.stdout + done.stderr
    assert value_of(builds(repository) / "stock") == 1
    assert value_of(builds(repository) / "patched") == 2
    described = json.loads((builds(repository) / "patched" / "build.json").read_text(encoding="utf-8"))
    assert [patch["name"] for patch in described["patches"]] == ["0001-two.patch"]
    assert set(described["cpu"]["features"]) <= set(CPU_FEATURES.values())


def test_it_starts_from_anywhere_through_a_link_without_a_home_in_any_locale(tmp_path: Path) -> None:
    llama = fake_llama(tmp_path / "ünï" / "llama.cpp")
    repository = fake_repository(tmp_path / "ünï" / "repository")
    (tmp_path / "link").symlink_to(repository / "build.sh")
    variables = build_environment(repository, LC_ALL="C", PYTHONUTF8="0")
    variables.pop("HOME", None)
    done = subprocess.run(
        f"exec '{tmp_path}/link' --source '{llama}' 0<&-",
        shell=True,
        cwd="/",
        env=variables,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stdout
    assert value_of(builds(repository) / "patched") == 2


def test_what_killed_calls_left_behind_is_swept_up_later(tmp_path: Path) -> None:
    for name, age in {".download-old": 7200, ".unpack-old": 7200, ".source-new": 60, "kept": 7200}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    fetch.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".source-new", "kept"]


def test_the_kept_libraries_need_nothing_outside_their_folder(tmp_path: Path, llama: Path, repository: Path) -> None:
    assert run_build(repository, "--source", str(llama)).returncode == 0
    moved = tmp_path / "moved"
    (builds(repository) / "patched").rename(moved)
    (repository / "home").rename(tmp_path / "elsewhere")
    assert value_of(moved) == 2
    assert (moved / "libllama.so").is_symlink()


def test_a_second_call_touches_nothing(llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    before = stamps(repository / "home" / "builds"), stamps(repository / "home" / "sources" / "work-cpu")
    done = run_build(repository, "--source", str(llama))
    assert done.stdout.count("up to date") == 2
    assert before == (stamps(repository / "home" / "builds"), stamps(repository / "home" / "sources" / "work-cpu"))


def test_the_users_source_is_never_modified(llama: Path, repository: Path) -> None:
    before = stamps(llama)
    run_build(repository, "--source", str(llama))
    assert stamps(llama) == before


def test_an_edited_patch_recompiles_only_what_it_touches(llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    objects = repository / "home" / "sources" / "work-cpu" / "build" / "CMakeFiles"
    before = stamps(objects)
    write(repository, {"patches/0001-two.patch": PATCH.replace("return 2", "return 3")})
    done = run_build(repository, "--source", str(llama))
    assert value_of(builds(repository) / "patched") == 3
    assert "stock: up to date" in done.stdout
    after = stamps(objects)
    changed = [name for name, stamp in after.items() if name.endswith(".o") and before[name] != stamp]
    assert changed == ["ggml-base.dir/ggml/src/base.c.o"]


def test_an_edited_checkout_is_built_again(llama: Path, repository: Path) -> None:
    run_build(repository, "stock", "--source", str(llama))
    write(llama, {"ggml/src/base.c": '#include "ggml.h"\n\nint base_value(void) { return 7; }\n'})
    assert run_build(repository, "stock", "--source", str(llama)).returncode == 0
    assert value_of(builds(repository) / "stock") == 7


def test_a_patch_of_another_backend_leaves_the_build_as_it_is(llama: Path, repository: Path) -> None:
    write(llama, {"ggml/src/ggml-cuda/mmvq.cu": "// 1\n"})
    run_build(repository, "--source", str(llama))
    before = stamps(builds(repository) / "patched")
    cuda = "--- a/ggml/src/ggml-cuda/mmvq.cu\n+++ b/ggml/src/ggml-cuda/mmvq.cu\n@@ -1 +1 @@\n-// 1\n+// 2\n"
    write(repository, {"patches/0101-cuda.patch": cuda, "patches/series": "0001-two.patch\n0101-cuda.patch\n"})
    done = run_build(repository, "--source", str(llama))
    assert done.stdout.count("up to date") == 2, done.stdout + done.stderr
    after = stamps(builds(repository) / "patched")
    assert {name for name in after if after[name] != before[name]} == {"build.json"}
    described = json.loads((builds(repository) / "patched" / "build.json").read_text(encoding="utf-8"))
    assert [patch["compiled"] for patch in described["patches"]] == [True, False]


def test_the_witness_build_is_the_series_and_a_fault_and_is_made_only_when_asked_for(
    llama: Path, repository: Path
) -> None:
    fault = PATCH.replace("-int base_value(void) { return 1; }", "-int base_value(void) { return 2; }")
    fault = fault.replace("+int base_value(void) { return 2; }", "+int base_value(void) { return 3; }")
    missing = run_build(repository, "witness", "--source", str(llama))
    assert missing.returncode == 2 and "0301-witness-ulp.patch is not there" in missing.stderr
    write(repository, {"patches/tests/0301-witness-ulp.patch": fault})
    assert run_build(repository, "--source", str(llama)).returncode == 0
    assert not (builds(repository) / "witness").exists()
    assert run_build(repository, "witness", "--source", str(llama)).returncode == 0
    assert value_of(builds(repository) / "witness") == 3
    again = run_build(repository, "--source", str(llama))
    assert again.stdout.count("up to date") == 2, again.stdout + again.stderr
    assert value_of(builds(repository) / "patched") == 2


def test_a_patch_that_adds_and_one_that_removes_a_file(llama: Path, repository: Path) -> None:
    added = "--- /dev/null\n+++ b/ggml/src/new.h\n@@ -0,0 +1 @@\n+#define NEW 5\n"
    used = PATCH.replace("{ return 2; }", "{ return NEW; }").replace(
        ' #include "ggml.h"\n ', ' #include "ggml.h"\n+#include "new.h"\n '
    )
    used = used.replace("@@ -1,3 +1,3 @@", "@@ -1,3 +1,4 @@")
    write(
        repository,
        {"patches/0001-two.patch": added, "patches/0002.patch": used, "patches/series": "0001-two.patch\n0002.patch\n"},
    )
    assert run_build(repository, "--source", str(llama)).returncode == 0
    assert value_of(builds(repository) / "patched") == 5
    write(repository, {"patches/0001-two.patch": PATCH, "patches/series": "0001-two.patch\n"})
    assert run_build(repository, "--source", str(llama)).returncode == 0
    assert value_of(builds(repository) / "patched") == 2
    assert not (repository / "home/sources/work-cpu/src/ggml/src/new.h").exists()


def test_a_patch_that_does_not_apply_is_named_and_nothing_changes(llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    before = stamps(repository / "home" / "builds"), stamps(repository / "home" / "sources" / "work-cpu")
    write(repository, {"patches/0001-two.patch": PATCH.replace("return 1", "return 9")})
    done = run_build(repository, "--source", str(llama))
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert "0001-two.patch" in first and "ggml/src/base.c" in first and "FAILED" in first and "0c1e57098" in first
    assert "+int base_value(void) { return 2; }" in done.stderr  # the failing hunk itself
    assert before == (stamps(repository / "home" / "builds"), stamps(repository / "home" / "sources" / "work-cpu"))


def test_a_working_copy_left_half_patched_is_put_right(llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    work = repository / "home" / "sources" / "work-cpu" / "src"
    (work / "ggml/src/base.c").write_text("half a fi", encoding="utf-8")
    (work / "ggml/src/left-over.c").write_text("from another patch\n", encoding="utf-8")
    (builds(repository) / "patched" / "build.json").unlink()
    (builds(repository) / "stock" / "build.json").unlink()
    assert run_build(repository, "--source", str(llama)).returncode == 0
    assert (value_of(builds(repository) / "stock"), value_of(builds(repository) / "patched")) == (1, 2)
    assert not (work / "ggml/src/left-over.c").exists()


def test_a_kill_while_the_new_build_takes_its_place_loses_nothing(llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    stock = builds(repository) / "stock"
    stock.rename(stock.with_name(".stock.new"))  # the old one moved away, the new one not yet named
    done = run_build(repository, "--source", str(llama))
    assert "stock: up to date" in done.stdout
    assert value_of(stock) == 1


def test_a_library_that_was_deleted_is_made_again(llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    (builds(repository) / "patched" / "libggml.so.0").unlink()
    assert run_build(repository, "--source", str(llama)).returncode == 0
    assert value_of(builds(repository) / "patched") == 2


def slow_fake(llama: Path) -> None:
    """Makes the compile step of libllama take two seconds more, so that a kill can hit it."""
    text = (llama / "CMakeLists.txt").read_text(encoding="utf-8")
    slow = (
        "add_custom_command(OUTPUT slow.txt COMMAND sleep 2 COMMAND ${CMAKE_COMMAND} -E touch slow.txt)\n"
        "add_custom_target(slow DEPENDS slow.txt)\nadd_dependencies(llama slow)\n"
    )
    write(llama, {"CMakeLists.txt": text + slow})


@pytest.mark.slow
@pytest.mark.parametrize(
    "after", [0.8, 2.3, *(pytest.param(s, marks=pytest.mark.hard) for s in (0.3, 1.3, 1.8, 3.0, 4.0))]
)
def test_kill_9_at_any_moment_and_the_next_call_ends_right(llama: Path, repository: Path, after: float) -> None:
    slow_fake(llama)
    command = ["sh", str(repository / "build.sh"), "--source", str(llama)]
    with subprocess.Popen(
        command, env=build_environment(repository), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
    done = run_build(repository, "--source", str(llama))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (value_of(builds(repository) / "stock"), value_of(builds(repository) / "patched")) == (1, 2)
    left = [path.name for path in (repository / "home" / "builds" / "cpu").iterdir()]
    assert sorted(left) == ["patched", "stock"]


def test_two_calls_at_once_build_once(llama: Path, repository: Path) -> None:
    slow_fake(llama)
    command = ["sh", str(repository / "build.sh"), "--source", str(llama)]
    both = [
        subprocess.Popen(
            command, env=build_environment(repository), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(output.count("done in") for output in outputs) == 2
    assert sum(output.count("up to date") for output in outputs) == 2
    assert (value_of(builds(repository) / "stock"), value_of(builds(repository) / "patched")) == (1, 2)


def test_a_compiler_error_shows_the_file_the_line_and_the_log(llama: Path, repository: Path) -> None:
    write(llama, {"src/llama.cpp": "this is no C++\n"})
    done = run_build(repository, "stock", "--source", str(llama))
    assert done.returncode == 2
    assert "llama.cpp:1:1: error" in done.stderr.splitlines()[0]
    assert str(repository / "home" / "logs" / "build-cpu-stock.log") in done.stderr
    assert "Traceback" not in done.stderr
    fake_llama(llama)
    assert run_build(repository, "stock", "--source", str(llama)).returncode == 0


# A machine that lacks a tool: a PATH of links to all but that one.
UTILITIES = ("sh", "dirname", "readlink", "env", "sleep", "as", "ld", "uname")


def path_without(folder: Path, *missing: str) -> str:
    folder.mkdir()
    links = {"c++": "c++", "g++": "g++", "cc": "cc", "gcc": "gcc", "cmake": "cmake", "ninja": "ninja", "patch": "patch"}
    for name in [*UTILITIES, *(link for link in links if link not in missing)]:
        if found := shutil.which(name, path=tools.search_path()):
            (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.parametrize(
    ("missing", "package"),
    [(("c++", "g++"), "g++"), (("cc", "gcc"), "gcc"), (("patch",), "patch")],
    ids=["no c++", "no cc", "no patch"],
)
def test_a_missing_tool_is_named_with_its_package(
    tmp_path: Path, llama: Path, repository: Path, missing: tuple[str, ...], package: str
) -> None:
    done = run_build(repository, "--source", str(llama), PATH=path_without(tmp_path / "bin", *missing))
    assert done.returncode == 2
    assert f"{missing[0]} not found" in done.stderr
    assert f"apt-get install {package} " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_cmake_and_ninja_come_from_the_environment_when_the_machine_has_none(
    tmp_path: Path, llama: Path, repository: Path, name: str
) -> None:
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    found = shutil.which(name, path=tools.search_path())
    assert found
    (environment / "bin" / name).symlink_to(found)
    variables = {"PATH": path_without(tmp_path / "bin", name), "VENV": str(environment)}
    assert run_build(repository, "--source", str(llama), **variables).returncode == 0


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_compiler_that_is_too_old_is_refused(tmp_path: Path, llama: Path, repository: Path) -> None:
    old = script(tmp_path / "old" / "g++-8", 'echo "g++ (GCC) 8.3.0"')
    script(tmp_path / "old" / "g++-8", 'case "$1" in -dump*) echo 8.3.0;; *) echo "g++ (GCC) 8.3.0";; esac')
    done = run_build(repository, "--source", str(llama), CXX=str(old))
    assert done.returncode == 2
    assert "version 8.3.0, 9 or later is needed" in done.stderr


def test_a_compiler_that_does_not_start_is_refused(llama: Path, repository: Path) -> None:
    done = run_build(repository, "--source", str(llama), CXX="g++-of-nowhere")
    assert done.returncode == 2
    assert "CXX=g++-of-nowhere does not start" in done.stderr


def test_cuda_without_a_gpu_asks_for_the_architecture(tmp_path: Path, llama: Path, repository: Path) -> None:
    path = path_without(tmp_path / "bin")
    done = run_build(repository, "--backend", "cuda", "--source", str(llama), PATH=path)
    assert done.returncode == 2
    assert "--arch" in done.stderr and "native" not in done.stderr


def test_an_nvcc_that_refuses_the_host_compiler_is_explained(tmp_path: Path, llama: Path, repository: Path) -> None:
    said = (
        "host_config.h:132:2: error: #error -- unsupported GNU version! gcc versions later than 11 are not supported!"
    )
    nvcc = script(
        tmp_path / "cuda" / "nvcc",
        f'[ "$1" = --version ] && {{ echo "release 11.8, V11.8.89"; exit 0; }}; echo "{said}" >&2; exit 1',
    )
    done = run_build(repository, "--backend", "cuda", "--arch", "90", "--source", str(llama), CUDACXX=str(nvcc))
    assert done.returncode == 2
    assert "unsupported GNU version" in done.stderr and "CUDAHOSTCXX" in done.stderr


@pytest.mark.parametrize("arch", ["native", "9.0", "-1", "sm_90", ""])
def test_an_architecture_that_is_none_is_refused(llama: Path, repository: Path, arch: str) -> None:
    done = run_build(repository, "--backend", "cuda", f"--arch={arch}", "--source", str(llama))
    assert done.returncode == 2
    assert "no GPU architecture" in done.stderr


def test_a_home_that_cannot_be_written_is_one_line(llama: Path, repository: Path) -> None:
    done = run_build(repository, "--source", str(llama), HIRAISHIN_HOME="/proc/hiraishin")
    assert done.returncode == 2
    assert "HIRAISHIN_HOME" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_without_write_permission_is_one_line(tmp_path: Path, llama: Path, repository: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    done = run_build(repository, "--source", str(llama), HIRAISHIN_HOME=str(closed))
    assert done.returncode == 2
    assert "no permission" in done.stderr


def test_sources_that_are_none_are_refused(tmp_path: Path, llama: Path, repository: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.tar.gz").write_bytes(b"\x1f\x8b\x08\x00 not an archive")
    named = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    named.write_bytes(b"other bytes")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "cut.tar.gz", "some/file")
    cases = {
        "nowhere": "does not exist",
        "empty": "no llama.cpp source",
        "cut.tar.gz": "cannot be read as a tar archive",
        "other.tar": "holds no llama.cpp source",
        named.name: "checksum",
    }
    for name, said in cases.items():
        done = run_build(repository, "--source", str(tmp_path / name))
        assert (done.returncode, said in done.stderr) == (2, True), (name, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2"])
def test_an_archive_cut_short_or_damaged_is_refused(
    tmp_path: Path, llama: Path, repository: Path, compression: str
) -> None:
    whole = tmp_path / f"whole.tar.{compression}"
    write(llama, {"src/noise.h": "".join(hashlib.sha256(bytes([i])).hexdigest() for i in range(256))})
    with tarfile.open(whole, f"w:{compression}") as tar:  # type: ignore[call-overload]
        tar.add(llama, "llama.cpp")
    good = whole.read_bytes()
    middle = len(good) // 2
    for name, bad in {"cut": good[:middle], "damaged": good[:middle] + bytes(64) + good[middle + 64 :]}.items():
        (tmp_path / name).write_bytes(bad)
        done = run_build(repository, "--source", str(tmp_path / name))
        assert done.returncode == 2, (name, done.stdout)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not (repository / "home" / "builds").exists()


def test_a_trimmed_archive_builds_like_the_folder(tmp_path: Path, llama: Path, repository: Path) -> None:
    run_build(repository, "--source", str(llama))
    folder = json.loads((builds(repository) / "stock" / "build.json").read_text(encoding="utf-8"))
    with tarfile.open(tmp_path / "trimmed.tar.xz", "w:xz") as tar:
        tar.add(llama, "deep/inside/llama.cpp")
    done = run_build(repository, "--source", str(tmp_path / "trimmed.tar.xz"))
    assert done.stdout.count("up to date") == 2, done.stdout + done.stderr
    archive = json.loads((builds(repository) / "stock" / "build.json").read_text(encoding="utf-8"))
    assert archive["source"]["tree_sha256"] == folder["source"]["tree_sha256"]
    assert (folder["source"]["kind"], archive["source"]["kind"]) == ("folder", "archive")


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path, llama: Path, repository: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.add(llama, "llama")
        tar.add(llama / "LICENSE", "llama/src/../../../../escaped")
    done = run_build(repository, "--source", str(tmp_path / "evil.tar"))
    assert done.returncode == 2
    assert "unsafe path" in done.stderr


def test_compiler_flags_of_the_caller_stay_out(llama: Path, repository: Path) -> None:
    broken = {"CFLAGS": "-Dint=nonsense", "CXXFLAGS": "-Dint=nonsense", "LDFLAGS": "-lnowhere", "NINJA_STATUS": "odd "}
    assert run_build(repository, "--source", str(llama), **broken).returncode == 0


@pytest.mark.parametrize("arguments", [["neither"], ["--jobs", "0"], ["--backend", "metal"], ["--arch", "90"]])
def test_wrong_arguments_end_with_2(repository: Path, arguments: list[str]) -> None:
    assert run_build(repository, *arguments).returncode == 2


def test_a_python_that_is_too_old_is_not_used(tmp_path: Path, repository: Path) -> None:
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.14", "python"):
        script(tmp_path / "bin" / name, "exit 1")
    for name in ("sh", "dirname", "readlink"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    done = run_build(repository, PATH=str(tmp_path / "bin"), PYTHON="")
    assert done.returncode == 2
    assert "Python 3.11" in done.stderr


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that serves whatever lies in this folder."""
    served = tmp_path / "served"
    served.mkdir()

    def pip(command: list[str]) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1])
        for file in served.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return subprocess.CompletedProcess(command, 0 if any(served.iterdir()) else 1, "", "ERROR: Connection refused")

    monkeypatch.setattr(fetch, "run_pip", pip)
    return served


def test_a_damaged_download_is_fetched_again(tmp_path: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = b"the right bytes"
    pin = {"version": "1.0", "sha256": hashlib.sha256(good).hexdigest()}
    monkeypatch.setattr(fetch, "pins", lambda: {"some_package": pin})
    name = "some_package-1.0.tar.gz"
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / name).write_bytes(good[:5])
    (downloads / name).write_bytes(good)
    assert fetch.fetch("some_package", tmp_path / "sources").read_bytes() == good
    (downloads / name).unlink()
    assert fetch.fetch("some_package", tmp_path / "sources").read_bytes() == good  # and not a second time
    (tmp_path / "sources" / name).unlink()
    with pytest.raises(UserError, match="cannot be downloaded"):
        fetch.fetch("some_package", tmp_path / "sources")
    assert not list((tmp_path / "sources").iterdir())


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "wrong checksum"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "ERROR: Could not find a version that satisfies the requirement x\nERROR: No matching distribution found for x",
            "network",
        ),
        ("ERROR: something else", "something else"),
        ("", "no output"),
    ],
)
def test_pip_failures_become_one_clear_line(log: str, said: str) -> None:
    error = str(fetch.download_error("x", log))
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_shim_that_cannot_start_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bin" / "patch", "echo nothing here >&2; exit 127")
    script(tmp_path / "later" / "patch", "echo GNU patch 2.7.6")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{tmp_path / 'later'}")
    assert tools.need("patch").path == str(tmp_path / "later" / "patch")


def test_an_old_tool_gives_way_to_a_newer_one_further_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bin" / "cmake", "echo cmake version 3.10.2")
    script(tmp_path / "later" / "cmake", "echo cmake version 3.28.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{tmp_path / 'later'}")
    assert tools.need("cmake").version == (3, 28, 1)
