"""What a site holds as files: figures with their data, and downloads; and whose results it shows."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.report.facts import Book, machine_label

if TYPE_CHECKING:
    import pandas as pd

    from hiraishin.claims import Claim
    from hiraishin.profile import Profile
    from hiraishin.results import Result, ResultSet

LARGEST_DOWNLOAD = 450_000
"""Bytes of one downloadable table; a larger one is named with its size instead."""

LARGEST_PLAIN_CSV = 150_000
"""Bytes of a figure's data that is offered as it is; more is compressed."""

ALL_DOWNLOADS = 1_000_000
"""Bytes of all downloadable tables together, so that the site keeps to its budget."""

KEY = 16
"""Characters of a unit's key by which tables name it."""


@dataclass
class FigureSlot:
    """A figure as the templates see it: where its files are, or why there are none."""

    id: str
    ok: bool = False
    known: bool = True
    title: str = ""
    alt: str = ""
    caption: str = ""
    notebook: str = ""
    notebook_href: str = ""
    folder: str = "figures"
    problem: str = ""
    width: int = 0
    height: int = 0
    csv: str = ""
    anchor: str = ""
    bug: bool = False
    _number: int | None = None
    _counter: list[int] = field(default_factory=lambda: [0])

    @property
    def number(self) -> int:
        """Its number on the page, given in the order in which the page shows figures."""
        if self._number is None:
            self._counter[0] += 1
            self._number = self._counter[0]
        return self._number

    @property
    def placed(self) -> bool:
        """Whether the page has shown it."""
        return self._number is not None


def make_figures(
    results: ResultSet,
    out: Path,
    folder: str,
    prefix: str = "",
    counter: list[int] | None = None,
    only: Collection[str] = (),
    units: Units | None = None,
) -> dict[str, FigureSlot]:
    """Render every figure the results can carry into ``out/folder``; a figure that fails is named, the rest is made.

    Args:
        results: what to draw from.
        out: the site's root.
        folder: where the files go, relative to ``out``.
        prefix: start of the anchors (a receipt's name), so that ids stay unique on a page.
        only: ids to draw; all by default.
        counter: shared by all figures of one page, for their numbers.
        units: collects the results that the figures were made from.
    """
    from hiraishin import figures
    from hiraishin.figures.save import save

    slots: dict[str, FigureSlot] = {}
    units = units if units is not None else Units()
    shared = counter if counter is not None else [0]
    for id, module in figures.registry().items():
        if only and id not in only:
            continue
        slot = FigureSlot(id, title=module.TITLE.rstrip("."), notebook=module.NOTEBOOK, folder=folder, _counter=shared)
        slot.anchor = f"{prefix}fig-{id}"
        try:
            saved = save(id, results, out / folder)
            slot.ok, slot.alt, slot.caption = True, saved.alt, saved.caption
            slot.width, slot.height = svg_size(out / folder / f"{id}.light.svg")
            slot.csv = _slim(out / folder, id, units)
        except UserError as error:
            slot.problem = str(error)
        except Exception as error:  # a bug in one figure must not take the page with it
            slot.problem, slot.bug = f"{type(error).__name__}: {error}", True
        slots[id] = slot
    return slots


def _slim(folder: Path, id: str, units: Units) -> str:
    """Keep the site small: no PNG beside the SVGs, a large CSV compressed, units named and not repeated. The data file's name."""
    (folder / f"{id}.png").unlink(missing_ok=True)
    record = folder / f"{id}.json"
    record.write_bytes(as_json(units.take(json.loads(record.read_text(encoding="utf-8"))), indent=None))
    data = folder / f"{id}.csv"
    if data.stat().st_size <= LARGEST_PLAIN_CSV:
        return data.name
    packed = folder / f"{id}.csv.gz"
    packed.write_bytes(_gz(data.read_bytes()))
    data.unlink()
    return packed.name


def _gz(blob: bytes) -> bytes:
    """Compressed, the same on every run."""
    return gzip.compress(blob, 9, mtime=0)


UNITS = "units.json.gz"
"""Under ``data/``: every unit that some figure was made from, once."""


@dataclass
class Units:
    """Units behind figures, each kept once; many figures share them, and each has inputs and provenance of a kilobyte."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    provenances: list[Any] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def take(self, record: dict[str, Any]) -> dict[str, Any]:
        """A figure's provenance with its units named by the start of their keys, and the inputs that they share."""
        results = record.get("results") or []
        kinds: dict[str, list[str]] = {}
        for r in results:
            text = json.dumps(r["provenance"], sort_keys=True)
            number = self._numbers.setdefault(text, len(self._numbers))
            if number == len(self.provenances):
                self.provenances.append(r["provenance"])
            self.entries[r["key"]] = {"kind": r["kind"], "inputs": r["inputs"], "provenance": number}
            kinds.setdefault(r["kind"], []).append(r["key"][:KEY])
        first = results[0]["inputs"] if results else {}
        return {
            **record,
            "results": [{"kind": k, "count": len(v), "units": " ".join(v)} for k, v in sorted(kinds.items())],
            "common_inputs": {k: v for k, v in first.items() if all(r["inputs"].get(k, r) == v for r in results)},
            "about_units": f"data/{UNITS}" if results else None,
        }

    def write(self, out: Path) -> Download | None:
        """The file that tells of every unit: its whole key, inputs and provenance. ``None`` when there is no unit."""
        if not self.entries:
            return None
        document = {"units": self.entries, "provenances": self.provenances}
        blob = _gz(as_json(document, indent=None))
        folder = out / "data"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNITS).write_bytes(blob)
        what = "inputs and provenance of every unit that a figure was made from, by its key"
        return Download(UNITS, what, len(blob), hashlib.sha256(blob).hexdigest())


def svg_size(path: Path) -> tuple[int, int]:
    """Width and height of an SVG in CSS pixels, for the ``img`` element; (0, 0) when it does not say."""
    head = path.read_text(encoding="utf-8")[:2000]
    tag = re.search(r"<svg\b[^>]*>", head)
    found = {
        name: float(size) * {"pt": 4 / 3, "px": 1.0, "": 1.0}[unit]
        for name, size, unit in re.findall(r'\b(width|height)="([\d.]+)(pt|px|)"', tag[0] if tag else "")
    }
    return (round(found["width"]), round(found["height"])) if len(found) == 2 else (0, 0)


def make_books(results: ResultSet | None, profile: Profile, failures: list[str]) -> list[Book]:
    """The run of this report first, then every receipt; a damaged receipt is named and left out."""
    from hiraishin.claims import claims
    from hiraishin.results import load_receipt

    machine = dict(results.machine) if results is not None else {}
    found = tuple(_claims_of(claims, results, profile.name, failures)) if results is not None else ()
    books = [Book("here", machine_label(machine, "This machine"), machine, found, results)]
    for path in sorted(paths.receipts_dir().glob("*/receipt.json")):
        try:
            receipt = load_receipt(path.parent)
        except UserError as error:
            failures.append(str(error))
            continue
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.parent.name)
        label = machine_label(receipt.machine, path.parent.name)
        label = f"{label}, {receipt.name}" if receipt.name else label
        books.append(Book(name, label, receipt.machine, tuple(_claims_of(claims, receipt, name, failures)), receipt))
    labels = [b.label for b in books]
    return [b if labels.count(b.label) == 1 else dataclasses.replace(b, label=f"{b.label} ({b.name})") for b in books]


def by_machine(books: Sequence[Book]) -> list[Book]:
    """The books for the ledger: this run, then one book for each other machine, with all that its receipts hold."""
    from hiraishin.results import ResultSet

    groups: dict[str, list[Book]] = {}
    for book in books[1:]:
        groups.setdefault(machine_label(book.machine, book.label), []).append(book)
    merged = [
        Book(
            members[0].name,
            label,
            members[0].machine,
            tuple(c for b in members for c in b.claims),
            ResultSet(None, members[0].machine, [r for b in members if b.results for r in b.results.results]),
        )
        for label, members in groups.items()
    ]
    return [*books[:1], *merged]


def _claims_of(
    claims: Callable[[ResultSet], list[Claim]], results: ResultSet, name: str, failures: list[str]
) -> list[Claim]:
    try:
        return claims(results)
    except Exception as error:  # one bad result must not take the page with it
        failures.append(f"the claims of {name} cannot be computed: {type(error).__name__}: {error}")
        return []


def is_gpu(machine: Mapping[str, Any]) -> bool:
    """Whether a machine has a GPU."""
    return bool(machine.get("gpu") or machine.get("gpu_name"))


# Downloads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Download:
    """One file to download, or one that was left out with the reason."""

    name: str
    what: str
    size: int
    sha256: str = ""
    left_out: str = ""

    @property
    def human_size(self) -> str:
        """Its size in words."""
        if self.size < 1000:
            return f"{self.size} bytes"
        return f"{self.size / 1000:,.0f} kB" if self.size < 1_000_000 else f"{self.size / 1e6:.1f} MB"


def write_downloads(out: Path, books: Sequence[Book], ledger_rows: Sequence[Any], profile: str) -> list[Download]:
    """Claims, ledger and results as CSV, JSON and Parquet under ``out/data``."""
    import pandas as pd

    folder = out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Download] = []
    spent = 0

    def put(name: str, what: str, blob: bytes, *, always: bool = False) -> None:
        nonlocal spent
        if not always and (len(blob) > LARGEST_DOWNLOAD or spent + len(blob) > ALL_DOWNLOADS):
            files.append(Download(name, what, len(blob), left_out="too large for the page; it is in the result store"))
            return
        spent += len(blob)
        (folder / name).write_bytes(blob)
        files.append(Download(name, what, len(blob), hashlib.sha256(blob).hexdigest()))

    for book in books:
        stem = "claims" if book.name == "here" else f"claims-{book.name}"
        rows = [_claim_dict(c) for c in book.claims]
        document = {
            "profile": profile if book.name == "here" else book.name,
            "machine": dict(book.machine),
            "claims": rows,
        }
        put(f"{stem}.json.gz", f"every claim, {book.label}", _gz(as_json(document, indent=None)), always=True)
        if book.name != "here":
            continue
        put(
            f"{stem}.csv",
            f"every claim, {book.label}",
            _csv([{**r, "params": json.dumps(r["params"], sort_keys=True)} for r in rows]),
            always=True,
        )
    put("ledger.json", "the ledger with its verdicts", as_json([row.as_json() for row in ledger_rows]), always=True)
    for name in ("post.toml", "source.toml"):
        put(
            name,
            "published numbers and constants of the source",
            (paths.published_dir() / name).read_bytes(),
            always=True,
        )
    # Receipts of other machines are in the repository as they are; only this run's results are written out.
    here = books[0].results
    kinds = {r.kind for r in here.results} if here is not None else set()
    for kind in sorted(
        kinds, key=lambda kind: (kind != "replay", kind)
    ):  # the rows of the replay are what others ask for
        units = here.of(kind) if here is not None else []
        table = _units(units).to_csv(index=False, lineterminator="\n").encode()
        packed = len(table) > LARGEST_PLAIN_CSV
        put(
            f"{kind}.csv.gz" if packed else f"{kind}.csv",
            f"one row a unit: inputs and record, {kind}",
            _gz(table) if packed else table,
        )
        frames = [r.table.assign(unit=r.key[:KEY]) for r in units if r.table is not None and len(r.table)]
        if frames:
            buffer = io.BytesIO()
            pd.concat(frames, ignore_index=True).to_parquet(buffer, index=False, compression="zstd")
            put(f"{kind}.parquet", f"all rows of all units, {kind}", buffer.getvalue())
    return files


def _units(results: Sequence[Result]) -> pd.DataFrame:
    """One row a unit: the start of its key (as in the Parquet file), its scalar inputs and the scalars of its record."""
    import pandas as pd

    def row(r: Result) -> dict[str, Any]:
        both = {**r.inputs, **r.record}
        return {"unit": r.key[:KEY]} | {k: v for k, v in both.items() if isinstance(v, str | int | float)}

    return pd.DataFrame([row(r) for r in results])


def _claim_dict(claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "build": claim.build,
        "params": dict(claim.params),
        "value": claim.value,
        "unit": claim.unit,
        "detail": claim.detail,
    }


def as_json(value: Any, indent: int | None = 1) -> bytes:
    """A JSON file's bytes."""
    return json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n"


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return buffer.getvalue().encode()
