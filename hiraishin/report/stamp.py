"""Whether a finished report is still the one that would be built: then nothing is drawn or written again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiraishin import paths, provenance
from hiraishin.profile import Profile
from hiraishin.results import ResultSet

# Everything that a page is made from, besides the results.
_SOURCES = ("hiraishin", "report/templates", "report/assets", "notebooks", "data", "patches", "pyproject.toml")


def inputs(profile: Profile, results: ResultSet, options: Mapping[str, Any]) -> str:
    """Hash over results, profile, options, commit, and the files that pages are made from."""
    digest = hashlib.sha256()

    def add(*parts: Any) -> None:
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode())

    add(profile.model_dump(mode="json"), results.machine, dict(options), provenance.commit())
    for result in sorted(results.results, key=lambda r: (r.kind, r.key)):
        add(result.kind, result.key, result.record, None if result.table is None else result.table.shape)
    for source in _SOURCES:
        top = paths.ROOT / source
        for file in [top] if top.is_file() else sorted(f for f in top.rglob("*") if f.is_file()):
            if "__pycache__" not in file.parts:
                add(file.relative_to(paths.ROOT).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest())
    return digest.hexdigest()


def listing(folder: Path) -> str:
    """Hash over the names and sizes of a site's files, its summary left out."""
    found = sorted(
        (f.relative_to(folder).as_posix(), f.stat().st_size)
        for f in folder.rglob("*")
        if f.is_file() and f.name != "report.json"
    )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def missing_of(out: Path, stamp: str) -> list[str] | None:
    """What a finished report of these inputs notes as missing; ``None`` if the folder holds no such report, or not all of it."""
    try:
        summary = json.loads((out / "report.json").read_text(encoding="utf-8"))
        if summary["ok"] is True and summary["inputs"] == stamp and summary["files"] == listing(out):
            return [str(text) for text in summary["missing"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
