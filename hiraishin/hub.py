"""Fetch a GGUF file from a model hub: resumed after an interruption, believed only after its checksum.

``hf_hub_download`` of the pinned ``huggingface_hub`` throws an unfinished file away when its process ends, which
for 5 GB over a slow line is the whole evening. So this asks the hub for the file's metadata and continues a
partial file of our own with the package's ``http_get``, which also retries short interruptions. ``HF_ENDPOINT``
names another hub, ``HF_TOKEN`` or a stored login opens gated ones, as everywhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hiraishin import paths
from hiraishin.errors import UserError

if TYPE_CHECKING:
    from hiraishin.profile import Model

Echo = Callable[[str], None]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NETWORK_PACKAGES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_AGAIN = "Run the same command again: what has arrived is kept."


def fetch(model: Model, *, echo: Echo = print) -> Path:
    """The local path of a hub model's file, downloaded on first use.

    Args:
        model: a profile's model with ``repo``, ``file`` and, best, ``sha256``. Without one the checksum that the hub
            itself states for large files is compared.
        echo: called with one line before the download.

    Raises:
        UserError: the hub refuses (401, 403), does not know the repository or file (404), limits requests (429) or
            fails; the connection drops; the checksum is wrong (the file is removed then); no space.
    """
    assert model.repo is not None and model.file is not None
    target = target_path(model.repo, model.file)
    if target.is_file():
        return _believed(target, model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target, echo):
            # Another process may have finished it while we waited.
            if target.is_file():
                return _believed(target, model)
            return _download(model.repo, model.file, model.sha256, target, echo)
    except OSError as error:
        raise _explained(error, model.repo, model.file) from error


def target_path(repo: str, file: str) -> Path:
    """Where a hub file lives under the models folder.

    Raises:
        UserError: the name would lead outside of it.
    """
    parts = PurePosixPath(file).parts
    if not parts or ".." in parts or file.startswith("/") or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or ".." in repo:
        raise UserError(
            f"{repo}/{file} is no name of a file in a hub repository", "repo is owner/name, file a path in it."
        )
    return paths.models_dir().joinpath("hub", repo.replace("/", "--"), *parts)


def _believed(target: Path, model: Model) -> Path:
    from hiraishin.models import sha256_file

    if model.sha256 and sha256_file(target) != model.sha256.lower():
        raise UserError(
            f"{target.name} was downloaded before and has not the sha256 that the profile names",
            f"Delete {target} to get it again, or correct the profile.",
        )
    return target


@contextlib.contextmanager
def _only_one(target: Path, echo: Echo) -> Iterator[None]:
    """Hold a lock: two processes that append to one partial file would ruin it."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            echo(f"another process is downloading {target.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(repo: str, file: str, sha256: str | None, target: Path, echo: Echo) -> Path:
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from hiraishin.models import remember_sha256

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    url = hf_hub_url(repo, file, endpoint=endpoint)
    headers: dict[str, Any] = dict(build_hf_headers())
    try:
        about = get_hf_file_metadata(url, headers=headers, endpoint=endpoint)
    except Exception as error:
        raise _explained(error, repo, file) from error
    stated = (about.etag or "").lower()
    wanted = sha256.lower() if sha256 else stated if _SHA256.fullmatch(stated) else None
    # The partial file's name holds what it is a part of, so that parts of two versions never meet.
    version = (wanted or stated or "unknown")[:16]
    partial = target.with_name(f".{target.name}.{re.sub(r'[^0-9a-z]', '', version)}.partial")
    have = partial.stat().st_size if partial.exists() else 0
    if about.size is not None and have > about.size:
        partial.unlink()
        have = 0
    size = about.size or 0
    free = shutil.disk_usage(target.parent).free
    if free < size - have:
        raise UserError(
            f"{target.name} needs {(size - have) / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free in {target.parent}",
            "Free some space, or set HIRAISHIN_HOME to a folder on a larger disk.",
        )
    told = f", {have / 1e9:.2f} GB of it are here" if have else ""
    echo(f"downloading {repo}/{file} ({size / 1e9:.2f} GB{told})")
    location = about.location or url
    if urlsplit(location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # a token is for the hub, not for where it stores files
    try:
        with partial.open("ab") as sink:
            http_get(location, sink, resume_size=have, headers=headers, expected_size=about.size)
    except Exception as error:
        with contextlib.suppress(OSError):
            have = partial.stat().st_size
        raise _explained(
            error, repo, file, f" after {have / 1e9:.2f} of {size / 1e9:.2f} GB" if size else ""
        ) from error
    with partial.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if wanted and digest != wanted:
        partial.unlink()
        raise UserError(
            f"{file} arrived with sha256 {digest}, expected {wanted}; it was removed",
            "Run the same command again; if it repeats, the profile names another version of the file.",
        )
    os.replace(partial, target)
    remember_sha256(target, digest)
    return target


def _explained(error: Exception, repo: str, file: str, progress: str = "") -> Exception:
    """The one line for an error of the hub, the network or the disk; anything else stays what it is."""
    if isinstance(error, UserError):
        return error
    what = f"{repo}/{file}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return UserError(
            f"the hub refuses {what} ({status}): it is gated, private, or does not exist",
            "Check the name; for a gated model accept its terms, then set HF_TOKEN or run hf auth login.",
        )
    if status == 404:
        return UserError(f"the hub has no {what} (404)", "Check repo and file in the profile.")
    if status == 429:
        return UserError(f"the hub limits requests (429) for {what}{progress}", f"Wait some minutes. {_AGAIN}")
    if isinstance(status, int):
        return UserError(f"the hub answers {status} for {what}{progress}", f"Try later. {_AGAIN}")
    name = type(error).__name__
    if name == "OfflineModeIsEnabled":
        return UserError(f"{what} is not here and HF_HUB_OFFLINE forbids to fetch it", "Unset it, or copy the file.")
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"the disk is full while downloading {what}{progress}", f"Free some space. {_AGAIN}")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(
            f"cannot write in {paths.models_dir()}: {getattr(error, 'strerror', name)}",
            "Set HIRAISHIN_HOME to a folder that can be written.",
        )
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES:
        reason = " ".join(str(error).split())[:120] or name
        return UserError(f"the connection to the hub failed for {what}{progress} ({reason})", _AGAIN)
    return error
