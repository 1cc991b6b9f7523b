"""An audit as a receipt: one unit of the kind ``audit``, so that an audit made on one machine is read on another.

The unit's inputs are what was audited and how, its record is the report without the size of every row that moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hiraishin import provenance
from hiraishin.audit import AuditReport
from hiraishin.bundle import write_bundle
from hiraishin.errors import UserError
from hiraishin.results import Result, ResultSet, Unit

KIND = "audit"
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


def write_audits(audits: Sequence[Result], folder: Path, *, note: str = "") -> Path:
    """Write audits as one receipt (see :mod:`hiraishin.bundle`).

    Raises:
        UserError: the folder cannot be written, or there is nothing to write.
    """
    machine = audits[0].provenance["machine"] if audits else {}
    return write_bundle(ResultSet(None, machine, list(audits), name=KIND), folder, note=note)
