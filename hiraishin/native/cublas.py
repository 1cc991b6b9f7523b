"""cuBLAS for a CUDA toolkit that came without it: that of the Python packages, which PyTorch brings along.

A toolkit of a compiler alone (a container image, some packages of distributions) has no ``cublas_v2.h``; CMake then finds
nothing to link, and says so in the middle of its log.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hiraishin.errors import UserError
from hiraishin.native import tools
from hiraishin.native.fetch import make_folder

_HEADER = "cublas_v2.h"
_LIBRARIES = ("cublas", "cublasLt")


def options(nvcc: tools.Tool, folder: Path) -> list[str]:
    """CMake's options for the cuBLAS to build with; none where the toolkit has its own.

    Args:
        nvcc: the compiler; it is asked whether it finds the header.
        folder: gets links to the headers of a Python package. Only to those: the package lies beside others, whose headers
            may be of another release than the compiler's.

    Raises:
        UserError: neither the toolkit nor a Python package has it.
    """
    if _toolkit_has_it(nvcc):
        return []
    package = _package(nvcc.version[0] if nvcc.version else 0)
    if package is None:
        raise UserError(f"the CUDA toolkit of {nvcc.path} has no cuBLAS ({_HEADER})", _hint(nvcc.version))
    headers, libraries = package
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    for header in headers.glob("cublas*.h"):
        (folder / header.name).symlink_to(header)
    # Quoted within: a shell reads the flags again, and CMake takes off quotes around the whole.
    return [f'-DCMAKE_CUDA_FLAGS=-I"{folder}"', *(f"-DCUDA_{name}_LIBRARY={path}" for name, path in libraries.items())]


def _toolkit_has_it(nvcc: tools.Tool) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch) / "probe.cu"
        probe.write_text(f"#include <{_HEADER}>\n", encoding="utf-8")
        command = [nvcc.path, "-E", str(probe), "-o", str(Path(scratch) / "probe.ii")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _package(major: int) -> tuple[Path, dict[str, Path]] | None:
    """Folder of headers and the libraries by name, of this major version, from the first Python that has both."""
    for place in _site_folders():
        for header in sorted(place.glob(f"nvidia/*/include/{_HEADER}")):
            found = {name: header.parent.parent / "lib" / f"lib{name}.so.{major}" for name in _LIBRARIES}
            if all(path.is_file() for path in found.values()):
                return header.parent, found
    return None


def _site_folders() -> list[Path]:
    """Where the Pythons at hand look for packages: the one on the ``PATH``, this one, the environment's."""
    pythons = [shutil.which("python3"), sys.executable, str(tools.environment_dir() / "bin" / "python")]
    places: dict[Path, None] = {}
    for python in dict.fromkeys(filter(None, pythons)):
        try:
            done = subprocess.run(
                [python, "-c", "import json, sys; print(json.dumps(sys.path))"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            places |= dict.fromkeys(Path(place) for place in json.loads(done.stdout) if place)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue  # a shim that starts nothing
    return list(places)


def _hint(version: tools.Version) -> str:
    package = "nvidia-cublas" if not version or version[0] > 12 else f"nvidia-cublas-cu{version[0]}"
    numbers = "-".join(map(str, version[:2])) or "VERSION"
    return f"Install it with: apt-get install libcublas-dev-{numbers} (NVIDIA's repository), or pip install {package}."
