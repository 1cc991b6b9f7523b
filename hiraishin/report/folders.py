"""The site's folder: built beside the target and renamed into place at the end, so a killed report leaves the old site whole.

``report.json`` is the last file written and the only evidence that a site is finished.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.report.check import MARKER
from hiraishin.report.site import as_json


def start(out: Path) -> Path:
    """The folder to build in, beside the target.

    Raises:
        UserError: the target holds something that is no report of ours, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).exists())):
        raise UserError(
            f"{out} exists and is no report of this project", "Choose another folder, or empty that one first."
        )
    stage = out.with_name(f".{out.name}.{os.getpid()}-{_host()}")
    try:
        _sweep(out)
        stage.mkdir(parents=True)
        shutil.copytree(paths.ROOT / "report" / "assets", stage / "assets")
    except OSError as error:
        raise UserError(
            f"cannot write a report beside {out}: {error.strerror or error}",
            "Set HIRAISHIN_REPORT to a folder that can be written.",
        ) from error
    return stage


def finish(stage: Path, out: Path, summary: Mapping[str, Any]) -> None:
    """Write the marker, then put the built folder in the target's place.

    Raises:
        UserError: the target cannot be replaced.
    """
    (stage / MARKER).write_bytes(as_json(summary))
    old = out.with_name(f".{out.name}.{os.getpid()}-{_host()}.old")
    for left in range(_TRIES, 0, -1):
        try:
            if out.exists():
                os.replace(out, old)
            os.replace(stage, out)
            break
        except OSError as error:  # perhaps another report that took the place between the two lines
            if old.exists() and not out.exists():
                os.replace(old, out)
            shutil.rmtree(old, ignore_errors=True)
            if left == 1 or error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise UserError(
                    f"cannot replace the report {out}: {error.strerror}", "Choose another folder."
                ) from error
    shutil.rmtree(old, ignore_errors=True)


_TRIES = 20


def _host() -> str:
    """Tells this machine's folders from another's on a shared disk, without its name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _sweep(out: Path) -> None:
    """Clear up after reports that were killed: half-built folders go; a site killed between its two renames comes back."""
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}.*-{_host()}*")):
        number, _, old = left.name.removeprefix(f".{out.name}.").partition(f"-{_host()}")
        if not number.isdigit() or old not in ("", ".old"):
            continue
        if int(number) != os.getpid() and psutil.pid_exists(int(number)):
            continue
        if old and not out.exists():
            os.replace(left, out)
        else:
            shutil.rmtree(left, ignore_errors=True)
