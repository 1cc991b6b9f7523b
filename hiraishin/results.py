"""The result store: small units, stored as soon as they exist, found again by what they depend on.

A *unit* is one measurement (one prompt x one width x one build, one pass-time series, one speculative run). Its
key is the sha256 of its kind and inputs, and the inputs name everything the value depends on: the build's
fingerprint, model and prompt hashes, parameters, and the version of the measuring code. So a changed prompt,
patch or library function makes other keys, and only what depends on it is measured again.

Layout: ``<root>/<kind>/<key>.json`` (the manifest) and, when the unit has rows, ``<root>/<kind>/<key>-<hash>.parquet``
(named after its own content, so that two writers of one unit cannot mix their halves). Both are written to a
temporary name in the same folder and renamed; the manifest comes last and carries the table's sha256, so a kill, a
full disk or a second writer can leave a missing unit, never a wrong one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiraishin.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from hiraishin.profile import Profile

SCHEMA = 1
_PARTIAL = ".partial"
_KIND = re.compile(r"[a-z][a-z0-9-]*")


def canonical_json(value: Any) -> str:
    """One spelling for one value: sorted keys, no spaces, ASCII only, NaN refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Unit:
    """What is measured: a kind and the inputs that its value depends on (plain JSON values)."""

    kind: str
    inputs: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ValueError(f"a unit's kind is lower case letters, digits and dashes, not {self.kind!r}")

    @property
    def key(self) -> str:
        """sha256 over the canonical JSON of kind and inputs."""
        return hashlib.sha256(canonical_json([self.kind, dict(self.inputs)]).encode()).hexdigest()


@dataclass(frozen=True)
class Result:
    """A measured unit: scalars in ``record``, rows in ``table``, and where it comes from in ``provenance``."""

    unit: Unit
    record: Mapping[str, Any]
    table: pd.DataFrame | None
    provenance: Mapping[str, Any]
    key: str

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The unit's inputs."""
        return self.unit.inputs

    @property
    def kind(self) -> str:
        """The unit's kind."""
        return self.unit.kind


class Store:
    """A folder of results. Safe with several writers: equal keys hold equal questions, renames are atomic.

    ``problems`` lists files that were found damaged or of another schema; they count as absent.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.problems: list[str] = []
        self._swept: set[Path] = set()

    def _manifest(self, kind: str, key: str) -> Path:
        return self.root / kind / f"{key}.json"

    def has(self, unit: Unit) -> bool:
        """Whether the unit is stored and sound."""
        return self.get(unit) is not None

    def get(self, unit: Unit) -> Result | None:
        """The stored result, or ``None`` when it is absent or fails its own hashes."""
        return self._read(self._manifest(unit.kind, unit.key), expected_key=unit.key)

    def all(self, kind: str | None = None) -> list[Result]:
        """Every sound result, by kind and key."""
        found: list[Result] = []
        pattern = f"{kind or '*'}/*.json"
        for path in sorted(self.root.glob(pattern)):
            result = self._read(path, expected_key=path.stem)
            if result is not None:
                found.append(result)
        return found

    def put(
        self,
        unit: Unit,
        record: Mapping[str, Any],
        table: pd.DataFrame | Mapping[str, list[Any]] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Result:
        """Store one unit.

        Raises:
            UserError: the folder cannot be written (no permission, disk full). Nothing stored before is lost.
            ValueError: the record holds NaN or something that is not plain JSON.
        """
        import pandas as pd

        frame = pd.DataFrame(dict(table)) if isinstance(table, Mapping) else table
        folder = self.root / unit.kind
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": unit.kind,
            "inputs": dict(unit.inputs),
            "record": dict(record),
            "provenance": dict(provenance or {}),
            "table_sha256": None,
        }
        canonical_json(manifest)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._sweep(folder)
            if frame is not None:
                blob = _parquet_bytes(frame)
                manifest["table_sha256"] = hashlib.sha256(blob).hexdigest()
                _write_atomically(_table_path(folder, unit.key, manifest["table_sha256"]), blob)
            body = canonical_json(manifest)
            manifest["manifest_sha256"] = hashlib.sha256(body.encode()).hexdigest()
            text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)
            _write_atomically(self._manifest(unit.kind, unit.key), text.encode())
        except OSError as error:
            raise UserError(
                f"cannot store a result in {folder}: {error.strerror or error}",
                "Free some space or set HIRAISHIN_HOME to a folder that can be written; what was stored is kept, "
                "and the same command goes on from there.",
            ) from error
        return Result(unit, dict(record), frame, dict(provenance or {}), unit.key)

    def _sweep(self, folder: Path) -> None:
        """Remove, once, what killed writers left in a folder; a file of the last hour may be somebody's who is writing."""
        if folder not in self._swept:
            self._swept.add(folder)
            for left in folder.glob(f".*{_PARTIAL}"):
                with contextlib.suppress(OSError):
                    if time.time() - left.stat().st_mtime > 3600:
                        left.unlink()

    def _read(self, path: Path, *, expected_key: str) -> Result | None:
        import pandas as pd

        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return self._problem(path, f"cannot be read ({error})")
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            return self._problem(path, "is of another schema")
        claimed = manifest.pop("manifest_sha256", None)
        try:
            unit = Unit(manifest["kind"], manifest["inputs"])
            if claimed != hashlib.sha256(canonical_json(manifest).encode()).hexdigest():
                return self._problem(path, "does not match its own checksum")
            if unit.key != expected_key or path.parent.name != unit.kind:
                return self._problem(path, "is stored under another unit's name")
            table = None
            if manifest["table_sha256"] is not None:
                table_path = _table_path(path.parent, unit.key, manifest["table_sha256"])
                blob = table_path.read_bytes()
                if hashlib.sha256(blob).hexdigest() != manifest["table_sha256"]:
                    return self._problem(table_path, "does not match its manifest")
                table = _parquet_frame(blob, pd)
            return Result(unit, manifest["record"], table, manifest["provenance"], unit.key)
        except (KeyError, TypeError, ValueError, OSError) as error:
            return self._problem(path, f"is damaged ({type(error).__name__}: {error})")

    def _problem(self, path: Path, what: str) -> Result | None:
        """Remember a damaged file; always ``None``, which is what the caller returns."""
        line = f"{path.relative_to(self.root)} {what}; it is measured again"
        if line not in self.problems:
            self.problems.append(line)
        return None


def _table_path(folder: Path, key: str, digest: str) -> Path:
    return folder / f"{key}-{digest[:12]}.parquet"


def _parquet_bytes(frame: pd.DataFrame) -> bytes:
    import io

    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def _parquet_frame(blob: bytes, pd: Any) -> pd.DataFrame:
    import io

    return pd.read_parquet(io.BytesIO(blob))  # type: ignore[no-any-return]


def _write_atomically(path: Path, blob: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:16]}.", suffix=_PARTIAL, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(blob)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclass
class ResultSet:
    """The results of one profile on one machine: what figures, claims and the report are made from."""

    profile: Profile | None
    machine: Mapping[str, Any]
    results: list[Result]
    name: str = ""
    missing: list[Unit] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def of(self, kind: str, **inputs: Any) -> list[Result]:
        """Results of a kind whose inputs have the given values."""
        return [r for r in self.results if r.kind == kind and all(r.inputs.get(k) == v for k, v in inputs.items())]

    def records(self, kind: str, **inputs: Any) -> pd.DataFrame:
        """One row a unit: its inputs and the scalar fields of its record."""
        import pandas as pd

        return pd.DataFrame([_scalars(r.inputs) | _scalars(r.record) for r in self.of(kind, **inputs)])

    def tables(self, kind: str, **inputs: Any) -> pd.DataFrame:
        """All rows of a kind, each with its unit's scalar inputs as further columns."""
        import pandas as pd

        frames = []
        for result in self.of(kind, **inputs):
            if result.table is not None and len(result.table):
                extra = {k: v for k, v in _scalars(result.inputs).items() if k not in result.table.columns}
                frames.append(result.table.assign(**extra))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if isinstance(v, (str, int, float, bool)) or v is None}


def load_receipt(folder: Path) -> ResultSet:
    """A receipt folder as a result set.

    Raises:
        UserError: no receipt, of another schema, or a file fails its checksum.
    """
    from hiraishin.bundle import read_bundle

    return read_bundle(folder)


def receipts(root: Path) -> Iterable[ResultSet]:
    """Every receipt under a folder, by name."""
    for path in sorted(root.glob("*/receipt.json")):
        yield load_receipt(path.parent)
