"""Receipts from other machines: check one and add it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.results import load_receipt

MAX_BYTES = 16 << 20


def import_receipt(folder: Path, *, into: Path | None = None) -> Path:
    """Check a receipt folder and copy its sound units into ``data/receipts``.

    Every file must pass its checksum; only the files that ``receipt.json`` names, itself, and the logs and
    Markdown of ``raw/`` are taken, so nothing that could run comes along.

    Args:
        folder: what ``hiraishin run --out`` wrote.
        into: the folder of receipts; the project's by default.

    Returns:
        the new folder.

    Raises:
        UserError: no receipt, damaged, empty, too large, or one of that name is there already.
    """
    if not folder.is_dir():
        raise UserError(f"there is no receipt folder {folder}")
    if links := [path for path in [folder / "raw", *folder.rglob("*")] if path.is_symlink()]:
        raise UserError(
            f"the receipt holds a link, {links[0].name}", "Links are not followed: put the file itself there."
        )
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    if size > MAX_BYTES:
        raise UserError(f"the receipt holds {size / 1e6:.0f} MB; {MAX_BYTES / 1e6:.0f} MB are the most")
    receipt = load_receipt(folder)
    if not receipt.results:
        raise UserError(f"the receipt {folder.name} holds no results")
    about = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
    name = re.sub(r"[^a-z0-9.-]+", "-", folder.resolve().name.lower()).strip("-.") or "receipt"
    target = (into or paths.receipts_dir()) / name
    if target.exists():
        raise UserError(f"a receipt named {name} is there already", "Rename the folder and import it again.")
    target.mkdir(parents=True)
    (target / "receipt.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in about["sha256"]:
        shutil.copyfile(folder / name, target / name)
    for log in (path for kind in ("*.log", "*.md") for path in (folder / "raw").glob(kind)):
        (target / "raw").mkdir(exist_ok=True)
        shutil.copyfile(log, target / "raw" / log.name)
    return target
