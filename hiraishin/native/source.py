"""The llama.cpp source, and the one working copy that the patch series is applied to.

The untouched source is unpacked once and never written again. The working copy is brought to a wanted state (untouched,
or untouched plus series) by computing the wanted bytes of every file aside and replacing only the files that differ.
So an edited patch gives a new time stamp to just the files whose content it changes, and a call that was killed in the
middle needs no undoing: the next one starts from the same two ends.
"""

from __future__ import annotations

import contextlib
import filecmp
import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native import environment, tools
from hiraishin.native.fetch import fetch, make_folder, pins, sha256

# What the library and the tools are built from; a checkout's models, documents and build folders stay out.
_TOP = (
    "CMakeLists.txt",
    "LICENSE",
    "licenses",
    "cmake",
    "ggml",
    "include",
    "src",
    "common",
    "vendor",
    "tests",
    "tools",
    "scripts",  # llama-server's build runs one of them
)
# What libllama is built from: two sources that agree here give the same library.
_LIBRARY = ("CMakeLists.txt", "cmake", "ggml", "include", "src")
_ROOT_FILE = "ggml/include/ggml.h"


@dataclass(frozen=True)
class Source:
    """An untouched source: its folder, the hash of what libllama is built from, and the upstream commit if it is known."""

    tree: Path
    tree_sha256: str
    kind: str
    commit: str | None
    origin: str | None = None  # the user's own folder or archive

    @property
    def described(self) -> str:
        """For messages: which llama.cpp this is."""
        return f"llama.cpp {self.commit}" if self.commit else "a llama.cpp of unknown commit"


@dataclass(frozen=True)
class Patch:
    """One file of the series, in its order; ``touches`` are the paths it changes, relative to the source."""

    name: str
    path: Path
    sha256: str
    touches: tuple[PurePosixPath, ...] = ()


def series() -> list[Patch]:
    """The patches that ``patches/series`` lists, in order; ``#`` starts a comment.

    Raises:
        UserError: there is no series, or it lists a file that is not there.
    """
    folder = paths.ROOT / "patches"
    try:
        lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"{folder / 'series'} cannot be read: {error.strerror}", "It lists the patches in order."
        ) from error
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"patches/series lists {missing[0]}, which is not in {folder}")
    return [Patch(name, folder / name, sha256(folder / name), _touched(folder / name)) for name in names]


def witness() -> list[Patch]:
    """The series and the fault that the localizer's tests plant: a build that is wrong on purpose.

    Raises:
        UserError: a patch is not there.
    """
    name = "tests/0301-witness-ulp.patch"
    path = paths.ROOT / "patches" / name
    if not path.is_file():
        raise UserError(f"{path} is not there", "The witness build plants the fault of that patch.")
    return [*series(), Patch(name, path, sha256(path), _touched(path))]


def operator_cases() -> list[Patch]:
    """The patches that give llama.cpp's own test-backend-ops its new cases: for a patched build with tools."""
    folder = paths.ROOT / "patches"
    found = sorted((folder / "tests").glob("02*.patch"))
    return [Patch(f"tests/{path.name}", path, sha256(path), _touched(path)) for path in found]


def _touched(patch: Path) -> tuple[PurePosixPath, ...]:
    text = patch.read_text(encoding="utf-8", errors="surrogateescape")
    names = re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)", text, re.MULTILINE)
    return tuple(PurePosixPath(name) for name in dict.fromkeys(names))


def pinned() -> Source:
    """The source that ``data/pins.toml`` names, fetched and unpacked if it is not here yet."""
    pin = pins()
    tree = paths.sources_dir() / f"llama.cpp-{pin['llama_cpp_python']['sha256'][:12]}"
    if tree.is_dir() and not all((tree / top).exists() for top in _TOP):
        shutil.rmtree(tree)  # unpacked when fewer folders counted
    if not tree.is_dir():
        known = paths.sources_dir() / f"llama_cpp_python-{pin['llama_cpp_python']['version']}.tar.gz"
        if not known.exists():
            environment.ensure()  # its pip does the download
        _unpack(fetch("llama_cpp_python", paths.sources_dir()), tree)
    return Source(tree, pin["llama_cpp"]["tree_sha256"], "pinned", pin["llama_cpp"]["commit"])


def foreign(given: Path) -> Source:
    """The user's own checkout or archive, read and never written.

    Raises:
        UserError: it does not exist, is no llama.cpp, or is named like the pinned package and has other bytes.
    """
    if not given.exists():
        raise UserError(f"--source {given} does not exist")
    pin = pins()
    with tempfile.TemporaryDirectory(prefix=".source-", dir=make_folder(paths.sources_dir())) as scratch:
        copy = Path(scratch) / "tree"
        if given.is_dir():
            if not (given / _ROOT_FILE).is_file():
                raise UserError(f"--source {given} is no llama.cpp source: it has no {_ROOT_FILE}")
            for path in _files(given):
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(given / path, copy / path)
        else:
            if given.name.startswith("llama_cpp_python-0.3.36") and sha256(given) != pin["llama_cpp_python"]["sha256"]:
                raise UserError(
                    f"--source {given} is named like the pinned source package but its checksum is {sha256(given)}",
                    f"Expected {pin['llama_cpp_python']['sha256']}. Fetch it again, or rename it if it is meant to differ.",
                )
            _unpack(given, copy)
        hashes = {path: sha256(copy / path) for path in _files(copy)}
        tree = paths.sources_dir() / f"llama.cpp-{_digest(hashes)[:12]}"
        if not tree.is_dir():
            copy.rename(tree)
    for old in paths.sources_dir().glob("llama.cpp-*"):
        if old not in (tree, paths.sources_dir() / f"llama.cpp-{pin['llama_cpp_python']['sha256'][:12]}"):
            shutil.rmtree(old, ignore_errors=True)  # an earlier state of an edited checkout
    library = _digest({path: digest for path, digest in hashes.items() if path.parts[0] in _LIBRARY})
    same = library == pin["llama_cpp"]["tree_sha256"]
    commit = pin["llama_cpp"]["commit"] if same else _commit_of(given)
    return Source(tree, library, "folder" if given.is_dir() else "archive", commit, os.path.abspath(given))


def tree_sha256(tree: Path) -> str:
    """Hash of what libllama is built from in a source folder; what ``data/pins.toml`` calls ``tree_sha256``."""
    return _digest({path: sha256(tree / path) for path in _files(tree) if path.parts[0] in _LIBRARY})


def _digest(hashes: dict[PurePosixPath, str]) -> str:
    lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _files(tree: Path) -> Iterator[PurePosixPath]:
    """The files of a source that count, relative to it, without version control and without anyone's build folders."""
    for top in _TOP:
        if (tree / top).is_file():
            yield PurePosixPath(top)
        for folder, folders, files in os.walk(tree / top):
            folders[:] = [name for name in folders if name not in (".git", "__pycache__", "node_modules")]
            for name in files:
                path = Path(folder) / name
                if path.is_file():
                    yield PurePosixPath(path.relative_to(tree).as_posix())


def _commit_of(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():
        return None
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or None
    return None


def _unpack(archive: Path, target: Path) -> None:
    """The files that count, from a tar archive of llama.cpp or of the binding's source package, to ``target``."""
    try:
        with tarfile.open(archive) as tar:
            roots = [
                m.name.removesuffix(_ROOT_FILE) for m in tar if m.isfile() and f"/{m.name}".endswith(f"/{_ROOT_FILE}")
            ]
            if not roots:
                raise UserError(f"{archive} holds no llama.cpp source: it has no {_ROOT_FILE}")
            root = min(roots, key=len)
            with tempfile.TemporaryDirectory(prefix=".unpack-", dir=make_folder(target.parent)) as scratch:
                for member in tar:
                    inside = PurePosixPath(member.name.removeprefix(root))
                    if not (member.isfile() and member.name.startswith(root)) or inside.parts[0] not in _TOP:
                        continue
                    if ".." in inside.parts or inside.is_absolute():
                        raise UserError(f"{archive} holds the unsafe path {member.name}")
                    path = Path(scratch) / "tree" / inside
                    path.parent.mkdir(parents=True, exist_ok=True)
                    data = tar.extractfile(member)
                    assert data is not None
                    with path.open("wb") as file:
                        shutil.copyfileobj(data, file)
                # tarfile stops at the end mark; gzip checks its sum behind it.
                assert tar.fileobj is not None
                while tar.fileobj.read(1 << 20):
                    pass
                (Path(scratch) / "tree").rename(target)
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        reason = str(error).partition("\n")[0].rstrip(": ")
        raise UserError(
            f"{archive} cannot be read as a tar archive: {reason}", "It may be cut short; fetch it again."
        ) from error


def patched_files(source: Source, patches: Iterable[Patch], into: Path) -> set[PurePosixPath]:
    """Applies patches to copies of the files they touch, under ``into``; the source stays as it is.

    Returns:
        the touched paths; one that is absent under ``into`` was deleted by the series.

    Raises:
        UserError: a patch does not apply; says which one, where, and to which source the series belongs.
    """
    touched: set[PurePosixPath] = set()
    for patch in patches:
        for path in patch.touches:
            if path in touched:
                continue
            touched.add(path)
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            if (source.tree / path).is_file():
                shutil.copyfile(source.tree / path, into / path)
        rejected = into / ".rejected"
        # No fuzz: a hunk whose context changed is one that somebody has to look at.
        command = [
            tools.need("patch").path, "--strip=1", "--fuzz=0", "--batch", "--forward", "--no-backup-if-mismatch",
            f"--reject-file={rejected}", f"--directory={into}", f"--input={patch.path}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            output = (done.stdout + done.stderr).strip().splitlines()
            file = next(
                (line.removeprefix("patching file ") for line in output if line.startswith("patching file ")), "?"
            )
            hunk = next(
                (line for line in output if "FAILED" in line or "already exists" in line or "previously" in line), ""
            )
            hunks = rejected.read_text(encoding="utf-8", errors="replace").splitlines() if rejected.exists() else output
            pin = pins()
            raise UserError(
                f"patch {patch.name} does not apply to {source.described}: {file}: {hunk or output[-1]}",
                f"The series is made for llama.cpp {pin['llama_cpp']['commit']} (llama-cpp-python "
                f"{pin['llama_cpp_python']['version']}). Nothing was changed.\n"
                + "\n".join(f"  | {line}" for line in hunks[:40]),
            )
    return touched


def converge(work: Path, source: Source, patches: list[Patch]) -> list[PurePosixPath]:
    """Brings the working copy to source plus patches; files that already are as wanted keep their time stamps.

    Returns:
        the files that were written or removed.

    Raises:
        UserError: a patch does not apply (nothing is written then).
    """
    make_folder(work)
    with tempfile.TemporaryDirectory(prefix=".patching-", dir=work.parent) as scratch:
        staged = Path(scratch)
        touched = patched_files(source, patches, staged)
        wanted = {path: source.tree / path for path in _files(source.tree)}
        for path in touched:
            wanted[path] = staged / path
        changed: list[PurePosixPath] = []
        for path, origin in wanted.items():
            if not origin.is_file():
                continue
            target = work / path
            if target.is_file() and filecmp.cmp(origin, target, shallow=False):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and renamed, so that a kill leaves the old file or the new one; the time stamp is now.
            temporary = target.with_name(f".{target.name}.new")
            shutil.copyfile(origin, temporary)
            temporary.replace(target)
            changed.append(path)
        for path in set(_files(work)):
            if path not in wanted or not wanted[path].is_file():
                (work / path).unlink()
                changed.append(path)
        filecmp.clear_cache()
    return changed
