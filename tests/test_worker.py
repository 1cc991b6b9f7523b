"""The measuring child: what it loads is known, and its death is an error message, never the parent's death."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hiraishin.builds import Build, find_build
from hiraishin.errors import NativeCrash, UserError
from hiraishin.worker import Worker, same_ggml

pytestmark = pytest.mark.real_model


@pytest.fixture
def stock(home: Path) -> Build:
    return find_build("stock")


def test_the_child_reports_the_libraries_it_really_loaded(stock: Build) -> None:
    with Worker(stock) as worker:
        names = {name.split(".so")[0] for name in worker.libraries}
        assert {"libllama", "libggml", "libggml-base", "libggml-cpu"} <= names
        assert all(len(digest) == 64 for digest in worker.libraries.values())


def test_two_builds_are_told_apart_and_a_build_is_not_compared_with_itself(stock: Build) -> None:
    with Worker(stock) as a, Worker(stock) as b, Worker(find_build("patched")) as c:
        assert same_ggml(a.libraries, b.libraries)
        assert not same_ggml(a.libraries, c.libraries)


def test_a_native_abort_is_an_error_with_the_assert_text_and_the_next_child_works(stock: Build) -> None:
    with Worker(stock) as worker, pytest.raises(NativeCrash, match="SIGABRT") as caught:
        worker.result("hiraishin.faults:native_abort", text="the planted assertion text")
    assert any("the planted assertion text" in line for line in caught.value.log)
    with Worker(stock) as worker:
        assert worker.result("hiraishin.faults:sleep", seconds=0) is None


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_child_is_named_with_its_signal(stock: Build, name: str) -> None:
    with Worker(stock) as worker, pytest.raises(NativeCrash, match=name):
        worker.result("hiraishin.faults:raise_signal", name=name)


def test_a_bug_in_the_child_is_one_line_and_its_traceback_is_in_the_log(stock: Build) -> None:
    with Worker(stock) as worker:
        with pytest.raises(UserError, match="RuntimeError: planted"):
            worker.result("hiraishin.faults:raise_error", text="planted")
        assert "Traceback" in worker.log_path.read_text()
        assert worker.result("hiraishin.faults:sleep", seconds=0) is None


def test_only_functions_of_this_package_can_be_called(stock: Build) -> None:
    with Worker(stock) as worker, pytest.raises(UserError, match="not part of hiraishin"):
        worker.result("os:getcwd")


def test_a_layout_with_one_offset_changed_is_refused(stock: Build) -> None:
    abi = copy.deepcopy(stock.abi)
    fields = abi["structs"]["llama_context_params"]["fields"]
    fields["n_threads"] += 4
    with pytest.raises(UserError, match=r"llama_context_params\.n_threads"):
        Worker(Build(stock.name, stock.backend, stock.lib_dir, stock.description, abi)).close()


def test_a_layout_with_one_size_changed_is_refused(stock: Build) -> None:
    abi = copy.deepcopy(stock.abi)
    abi["structs"]["llama_model_params"]["size"] += 8
    with pytest.raises(UserError, match=r"llama_model_params"):
        Worker(Build(stock.name, stock.backend, stock.lib_dir, stock.description, abi)).close()


def test_the_child_dies_with_its_parent(stock: Build) -> None:
    program = (
        "import os\nfrom hiraishin.builds import find_build\nfrom hiraishin.worker import Worker\n"
        "w = Worker(find_build('stock'))\nprint(w._child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    child = int(done.stdout)
    for _ in range(100):
        if (
            not Path(f"/proc/{child}").exists()
            or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1].split()[0]
        ):
            return
        time.sleep(0.05)
    pytest.fail("the child outlived its parent")
