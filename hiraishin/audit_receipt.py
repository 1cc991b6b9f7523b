"""An audit as a receipt: one unit of the kind ``audit``, so that an audit made on one machine is read on another.

The unit's inputs are what was audited and how, its record is the report without the size of every row that moved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hiraishin import provenance
from hiraishin.audit import AuditReport
from hiraishin.bundle import write_bundle
from hiraishin.errors import UserError
from hiraishin.results import Result, ResultSet, Unit, load_receipt

KIND = "audit"
_OF_A_RECEIPT = {"receipt.json", "units.jsonl", "units.jsonl.gz", "raw"}
_LEFT_OUT = ("rms", "worst")
_NOT_INPUTS = ("libraries", "machine")


def as_result(report: AuditReport) -> Result:
    """The audit as a result, with this machine's provenance."""
    record = report.to_json()
    for width in [*record["widths"], *record["unfused"]]:
        for name in _LEFT_OUT:
            width.pop(name, None)
    inputs = {k: v for k, v in record["about"].items() if k not in _NOT_INPUTS}
    inputs["widths"] = [width["width"] for width in record["widths"]]
    unit = Unit(KIND, inputs)
    about = {**provenance.describe(), "libraries": record["about"]["libraries"]}
    return Result(unit, record, None, about, unit.key)


def as_report(result: Result) -> AuditReport:
    """The report that a stored audit holds.

    Raises:
        UserError: it is none, or of another version.
    """
    try:
        return AuditReport(**result.record)
    except TypeError as error:
        raise UserError(f"the audit {result.key[:12]} cannot be read: {error}", "It is of another version.") from error


def stored_audits(folder: Path) -> list[Result]:
    """The audits that a folder holds already; further ones join them. None where there is no folder yet, or an empty one.

    Raises:
        UserError: it holds something else, which a receipt written there would remove; or a receipt that is damaged.
    """
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"cannot write the receipt {folder}: it is no folder", "Choose another --out.")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return []
    other = sorted(names - _OF_A_RECEIPT)
    if other or "receipt.json" not in names:
        raise UserError(
            f"cannot write the receipt {folder}: it holds {(other or sorted(names))[0]}, which is of no audit",
            "Choose another --out.",
        )
    found = load_receipt(folder).results
    if any(result.kind != KIND for result in found):
        raise UserError(
            f"cannot write the receipt {folder}: it holds other results than audits", "Choose another --out."
        )
    return found


def write_audits(audits: Sequence[Result], folder: Path, *, note: str = "") -> Path:
    """Write audits as one receipt (see :mod:`hiraishin.bundle`), beside those that the folder holds already.

    An audit of the same question takes the place of the older one.

    Raises:
        UserError: the folder cannot be written, holds anything but audits of this machine, or there is nothing to write.
    """
    machine = audits[0].provenance["machine"] if audits else {}
    older = stored_audits(folder) if audits else []
    for result in older:
        theirs = result.provenance.get("machine") or {}
        if any(theirs.get(part) != machine.get(part) for part in ("cpu", "gpu")):
            raise UserError(
                f"cannot write the receipt {folder}: it holds audits of another machine", "Choose another --out."
            )
    joined = {result.key: result for result in [*older, *audits]}
    return write_bundle(ResultSet(None, machine, list(joined.values()), name=KIND), folder, note=note)
