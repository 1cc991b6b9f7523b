"""One pinned file from the package index, through pip, so that whatever index the machine is set up for is used."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native import tools


def pins() -> dict[str, dict[str, Any]]:
    """``data/pins.toml``: table name to its keys.

    Raises:
        UserError: the file is missing or no TOML.
    """
    path = paths.ROOT / "data" / "pins.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", "Restore it from the repository.") from error


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path) -> Path:
    """The folder, made if missing.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create the folder {folder}: {error.strerror}", "Set HIRAISHIN_HOME to a folder you can write to."
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"no permission to write in {folder}", "Set HIRAISHIN_HOME to a folder you can write to.")
    return folder


def sweep(folder: Path) -> None:
    """Removes temporary folders that killed calls left in ``folder``; those of the last hour may be in use."""
    for kind in ("download", "unpack", "source", "patching", "abi"):
        for left in folder.glob(f".{kind}-*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > 3600:
                    shutil.rmtree(left, ignore_errors=True)


def fetch(package: str, into: Path) -> Path:
    """The file that ``data/pins.toml`` pins for ``package`` (its table's name), downloaded once.

    A file that is already there is believed only if its hash is right. The download goes to a temporary folder and is
    renamed, so an interrupted one leaves nothing behind.

    Args:
        package: table in the pins file with ``version``, ``sha256`` and, for a wheel, ``file``.
        into: folder for the file.

    Raises:
        UserError: no network, wrong checksum, disk full, no permission.
    """
    pin = pins()[package]
    for present in make_folder(into).glob(f"{package}-{pin['version']}[-.]*"):
        if sha256(present) == pin["sha256"]:
            return present
        present.unlink()  # cut short by a crash of the machine, or tampered with: fetch it again
    name = package.replace("_", "-")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=into) as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(f"{name}=={pin['version']} --hash=sha256:{pin['sha256']}\n", encoding="utf-8")
        form = ["--only-binary", ":all:"] if "file" in pin else ["--no-binary", name, "--no-build-isolation"]
        made = tools.environment_dir() / "bin" / "python"
        python = str(made) if made.exists() else sys.executable  # the latter where conda made the environment
        command = [
            python, "-m", "pip", "download", "--quiet", "--no-deps", *form,
            "--require-hashes", "--dest", scratch, "--requirement", str(wanted),
        ]  # fmt: skip
        done = run_pip(command)
        if done.returncode:
            raise download_error(f"{name} {pin['version']}", done.stdout + done.stderr)
        wanted.unlink()
        downloaded = next(Path(scratch).iterdir())
        target = into / downloaded.name
        try:
            shutil.move(downloaded, target)
        except OSError as error:
            raise UserError(
                f"cannot store {target}: {error.strerror}", "Free some disk space and start again."
            ) from error
    return target


def run_pip(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs pip or uv without questions, colours or progress bars; ``stdout`` and ``stderr`` are captured."""
    environment = os.environ | {
        "PATH": tools.search_path(), "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore",
        "NO_COLOR": "1",
    }  # fmt: skip
    # The interpreter's own path settings would leak this process's packages into the environment that is being made.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    try:
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            close_fds=False,  # an installer that outlives a kill keeps holding the lock
            check=False,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"ERROR: {command[0]}: {error.strerror}")


def download_error(what: str, log: str) -> UserError:
    """The error that says why pip could not bring ``what``, from pip's own output."""
    if "No space left" in log or "Errno 28" in log:
        return UserError(f"the disk is full while fetching {what}", "Free some space and start again; nothing is lost.")
    if "DO NOT MATCH THE HASHES" in log.upper():
        return UserError(
            f"{what} from the package index has the wrong checksum",
            "The file was refused. See data/pins.toml and requirements.lock.",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))] or lines[-1:]
    reason = errors[-1].removeprefix("ERROR:").removeprefix("error:").strip() if errors else "no output"
    if "No matching distribution" in reason or "Could not find a version" in reason or "onnection" in log:
        return UserError(
            f"{what} cannot be downloaded: {reason}", "Check the network and pip's index settings, then start again."
        )
    # A build backend's own exception says more than pip's summary of it.
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return UserError(f"{what} cannot be installed: {raised[-1] if raised else reason}", _log_hint(log))


def _log_hint(log: str) -> str:
    try:
        path = make_folder(paths.logs_dir()) / "set-up.log"
        path.write_text(log, encoding="utf-8", errors="replace")
    except (OSError, UserError):
        return ""
    return f"Log: {path}"
