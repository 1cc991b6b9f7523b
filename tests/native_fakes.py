"""A llama.cpp of a few lines, with the real one's layout and target names, that builds in a second or two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hiraishin import paths

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(fake C CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
include_directories(include ggml/include)
add_library(ggml-base SHARED ggml/src/base.c)
add_library(ggml SHARED ggml/src/ggml.c)
target_link_libraries(ggml ggml-base)
add_library(llama SHARED src/llama.cpp)
target_link_libraries(llama ggml)
set_target_properties(llama ggml ggml-base PROPERTIES VERSION 0.1.2 SOVERSION 0)
"""

# What abi.c needs to compile; the numbers mean nothing.
ABI = '#include "llama.h"\n#include <stdio.h>\nint main(void) { printf("{\\"structs\\": {}}"); return 0; }\n'

PATCH = "\n".join(
    [
        "--- a/ggml/src/base.c",
        "+++ b/ggml/src/base.c",
        "@@ -1,3 +1,3 @@",
        ' #include "ggml.h"',
        " ",
        "-int base_value(void) { return 1; }",
        "+int base_value(void) { return 2; }",
        "",
    ]
)


def write(root: Path, files: dict[str, str]) -> None:
    """Files below ``root``, relative path to text."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def fake_llama(root: Path) -> Path:
    """The source folder, written below ``root``."""
    write(
        root,
        {
            "CMakeLists.txt": CMAKE,
            "LICENSE": "none\n",
            "include/llama.h": "#pragma once\n",
            "ggml/include/ggml.h": "#pragma once\nint base_value(void);\n",
            "ggml/src/base.c": '#include "ggml.h"\n\nint base_value(void) { return 1; }\n',
            "ggml/src/ggml.c": '#include "ggml.h"\nint ggml_value(void) { return base_value(); }\n',
            "src/llama.cpp": 'extern "C" int ggml_value(void);\nextern "C" int llama_value(void) { return ggml_value(); }\n',
        },
    )
    return root


def fake_repository(root: Path, patches: dict[str, str] | None = None) -> Path:
    """A copy of what ``build.sh`` needs of this repository, with a series of its own and the short ABI program."""
    for name in ("build.sh", "tools", "hiraishin", "data/pins.toml", "pyproject.toml", "requirements.lock"):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == "hiraishin":
            target.mkdir()
            (target / "native").mkdir()
            for file in [*(paths.ROOT / name).glob("*.py"), *(paths.ROOT / name / "native").iterdir()]:
                if file.is_file():
                    (root / file.relative_to(paths.ROOT)).write_bytes(file.read_bytes())
        elif (paths.ROOT / name).is_dir():
            subprocess.run(["cp", "-r", str(paths.ROOT / name), str(target)], check=True)
        else:
            target.write_bytes((paths.ROOT / name).read_bytes())
            target.chmod((paths.ROOT / name).stat().st_mode)
    (root / "hiraishin" / "native" / "abi.c").write_text(ABI, encoding="utf-8")
    made = {"0001-two.patch": PATCH} if patches is None else patches
    write(root, {f"patches/{name}": text for name, text in made.items()})
    write(root, {"patches/series": "# in this order\n" + "".join(f"{name}\n" for name in made)})
    return root


def run_build(repository: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``build.sh`` of that repository, with its output."""
    return subprocess.run(
        ["sh", str(repository / "build.sh"), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=build_environment(repository, **variables),
        check=False,
    )


def build_environment(repository: Path, **variables: str) -> dict[str, str]:
    """The environment for ``build.sh``: a home of its own, and nothing that would choose another compiler."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "CUDACXX", "VENV", "PYTHONPATH")}
    return kept | {"HIRAISHIN_HOME": str(repository / "home"), "PYTHON": sys.executable} | variables


def value_of(library_folder: Path) -> int:
    """What ``llama_value()`` returns, asked in a process of its own."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).llama_value())"
    command = [sys.executable, "-c", code, str(library_folder / "libllama.so")]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
