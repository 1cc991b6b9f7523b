"""Receipts on disk: the results of a profile in a few files, small enough for git, each with its checksum.

A receipt folder holds ``receipt.json`` (profile, machine, date, commit, provenances, sha256 of every other file),
``units.jsonl`` (one unit a line: kind, inputs, record, which provenance; ``units.jsonl.gz`` when large) and
``<kind>.parquet`` (the rows of all units of a kind, ``_unit`` giving the line). Compared with a store, a receipt leaves
out what no figure or claim needs: the rows of replays that are equal everywhere, the candidates of rows that differ,
and all but 16 digits of row hashes. Plain data only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiraishin.errors import UserError
from hiraishin.results import Result, ResultSet, Unit, canonical_json

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 2
_DROPPED = ("reference_top_ids", "reference_top_logits", "top_ids", "top_logits")
_UNITS, _UNITS_GZ = "units.jsonl", "units.jsonl.gz"
_LARGE = 1 << 20
"""Bytes of units beyond which they are compressed."""
_LARGEST = 1 << 28
"""Bytes of units beyond which a receipt is none: a small file can claim to hold any number of them."""
_KIND = re.compile(r"[a-z][a-z0-9-]*")


def _lean(result: Result) -> pd.DataFrame | None:
    table = result.table
    if table is None or (
        result.kind == "replay" and not result.record.get("differing") and result.inputs["width"] != 1
    ):
        return None
    table = table.drop(columns=[c for c in _DROPPED if c in table.columns])
    if "row_sha256" in table.columns:
        table = table.assign(row_sha256=table["row_sha256"].str[:16])
    return table


def check_place(folder: Path) -> None:
    """Refuse a place where writing a receipt would remove something that is not of an older one.

    Raises:
        UserError: it is no folder, or a folder that holds anything but a receipt.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"cannot write the receipt {folder}: it is no folder", "Choose another --out.")
    names = sorted(path.name for path in folder.iterdir())
    other = [n for n in names if n not in ("receipt.json", "raw", _UNITS, _UNITS_GZ) and not n.endswith(".parquet")]
    if other or (names and "receipt.json" not in names):
        raise UserError(
            f"cannot write the receipt {folder}: it holds {(other or names)[0]}, which is of no receipt",
            "Choose another --out.",
        )


def write_bundle(results: ResultSet, folder: Path, *, note: str = "") -> Path:
    """Write a result set as a receipt.

    Args:
        results: what to write; its name becomes the receipt's profile.
        folder: made if need be; an older receipt in it is replaced as a whole.
        note: one line on how the run was made.

    Raises:
        UserError: the folder cannot be written, or there is nothing to write.
    """
    import pandas as pd

    if not results.results:
        raise UserError(f"there are no results of {results.name} to write", "Run the profile first.")
    check_place(folder)
    provenances: list[Any] = []
    lines: list[str] = []
    tables: dict[str, list[pd.DataFrame]] = {}
    for number, result in enumerate(results.results):
        about = dict(result.provenance)
        if about not in provenances:
            provenances.append(about)
        unit = {
            "kind": result.kind,
            "inputs": dict(result.inputs),
            "record": dict(result.record),
            "provenance": provenances.index(about),
        }
        lines.append(canonical_json(unit))
        table = _lean(result)
        if table is not None:
            tables.setdefault(result.kind, []).append(table.assign(_unit=number))
    units = ("\n".join(lines) + "\n").encode()
    files = {_UNITS_GZ: gzip.compress(units, mtime=0)} if len(units) > _LARGE else {_UNITS: units}
    for kind, frames in tables.items():
        buffer = io.BytesIO()
        pd.concat(frames, ignore_index=True).to_parquet(buffer, index=False, compression="zstd")
        files[f"{kind}.parquet"] = buffer.getvalue()
    from hiraishin import provenance

    head = {
        "schema": SCHEMA,
        "profile": results.name,
        "machine": dict(results.machine),
        "created": datetime.now(UTC).strftime("%Y-%m-%d"),
        **provenance.commit(),
        "note": note,
        "provenances": provenances,
        "sha256": {name: hashlib.sha256(blob).hexdigest() for name, blob in sorted(files.items())},
    }
    files["receipt.json"] = (json.dumps(head, indent=1, sort_keys=True) + "\n").encode()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".receipt-") as scratch:
            made = Path(scratch) / "receipt"
            made.mkdir()
            for name, blob in files.items():
                (made / name).write_bytes(blob)
            if (folder / "raw").is_dir():
                shutil.copytree(folder / "raw", made / "raw")
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(made, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the receipt {folder}: {error.strerror or error}", "Choose another --out."
        ) from error
    return folder


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _unpacked(blobs: Mapping[str, bytes]) -> bytes:
    """The lines of units, whichever way they were written."""
    if _UNITS in blobs:
        return blobs[_UNITS]
    with gzip.GzipFile(fileobj=io.BytesIO(blobs[_UNITS_GZ])) as file:
        units = file.read(_LARGEST + 1)
    if len(units) > _LARGEST:
        raise ValueError(f"{_UNITS_GZ} unpacks to more than {_LARGEST >> 20} MB")
    return units


def read_bundle(folder: Path) -> ResultSet:
    """A receipt folder as a result set, every file checked against its checksum.

    Raises:
        UserError: no receipt, of another schema, or a file is missing or damaged.
    """
    import pandas as pd

    def damaged(why: str) -> UserError:
        return UserError(f"the receipt {folder.name} is damaged: {why}", "Get it from its sender again.")

    try:
        head = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder} is no receipt: receipt.json: {error}", "`hiraishin run --out` writes one."
        ) from error
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        raise UserError(f"the receipt {folder.name} is of another schema", "Write it again with this version.")
    try:
        blobs = {}
        for name, digest in head["sha256"].items():
            if name not in (_UNITS, _UNITS_GZ) and not (name.endswith(".parquet") and _KIND.fullmatch(name[:-8])):
                raise damaged(f"it names a file {name!r}")
            blobs[name] = (folder / name).read_bytes()
            if hashlib.sha256(blobs[name]).hexdigest() != digest:
                raise damaged(f"{name} does not match its checksum")
        groups: dict[int, pd.DataFrame] = {}
        for name, blob in blobs.items():
            if name.endswith(".parquet"):
                frame = pd.read_parquet(io.BytesIO(blob))
                for number, rows in frame.groupby("_unit", sort=False):
                    groups[int(number)] = rows.drop(columns="_unit").reset_index(drop=True)  # type: ignore[arg-type]
        results = []
        if not isinstance(head["machine"], dict):
            raise damaged("its machine is no table")
        for number, line in enumerate(_unpacked(blobs).decode().splitlines()):
            item: Mapping[str, Any] = json.loads(line, parse_constant=_refuse)
            if not all(isinstance(item[part], dict) for part in ("inputs", "record")):
                raise damaged(f"unit {number} has no inputs or no record")
            unit = Unit(item["kind"], item["inputs"])
            canonical_json(item["record"])  # refuses 1e999, which is read as infinity
            about = head["provenances"][item["provenance"]]
            results.append(Result(unit, item["record"], groups.get(number), about, unit.key))
        return ResultSet(None, head["machine"], results, name=str(head["profile"]))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
        EOFError,
        zlib.error,
    ) as error:
        raise damaged(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
