"""The ledger's verdicts: every claim of the post held against this machine, every receipt, and plain arithmetic.

``data/ledger.toml`` has the rows; this package has one function a row, named there as ``test``. A function sees one
book (the claims and results of one run) and returns what it found, or ``None`` when that run cannot say. No verdict
is typed anywhere: a row that no function can decide is *not testable here*, with what it would take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.ledger import computing, pricing, replaying, speculating  # noqa: F401  (they register the rows' functions)
from hiraishin.ledger.base import (
    ARITHMETIC,
    DIFFERS,
    EXPLAINED,
    NOT_TESTABLE,
    REPRODUCED,
    TESTS,
    VERDICTS,
    Finding,
    Judge,
    Row,
    read_toml,
)
from hiraishin.report.facts import Book, Published

__all__ = [
    "ARITHMETIC",
    "DIFFERS",
    "EXPLAINED",
    "NOT_TESTABLE",
    "REPRODUCED",
    "TESTS",
    "VERDICTS",
    "Finding",
    "Judge",
    "Row",
    "load_rows",
    "rows",
    "view",
]


def load_rows(path: Path | None = None) -> list[dict[str, Any]]:
    """The rows of ``data/ledger.toml``.

    Raises:
        UserError: the file is missing or malformed.
    """
    rows: list[dict[str, Any]] = read_toml(path or paths.ROOT / "data" / "ledger.toml")["row"]
    return rows


def rows(books: Sequence[Book], published: Mapping[str, Published], source: Path | None = None) -> list[Row]:
    """Every row with its verdict, from the books given (the run of this report first, then receipts).

    A test that breaks on one book's data is reported as a finding-less book, never as a verdict; the error's text is
    kept in the row's ``needs``.
    """
    judges = [Judge(book, published) for book in books]
    made = []
    for entry in load_rows(source):
        name = entry["test"]
        if name not in TESTS and name not in ARITHMETIC:
            raise UserError(
                f"the ledger's row {entry['number']} names no test: {name!r}", "Add it to hiraishin/ledger/."
            )
        findings: list[Finding] = []
        needs = entry.get("needs", "")
        for judge in judges:
            if name not in TESTS:
                break
            try:
                found = TESTS[name](judge)
            except (KeyError, TypeError, ValueError, LookupError) as error:
                needs = (
                    f"{needs}; the results of {judge.book.label} could not be read ({type(error).__name__}: {error})"
                )
                continue
            if found is not None:
                findings.append(Finding(found.verdict, found.text, judge.book.label))
        if name in ARITHMETIC:
            findings.append(ARITHMETIC[name](published))
        made.append(
            Row(
                entry["number"],
                _claim_text(entry["claim"], published),
                entry["rule"],
                needs,
                tuple(published[key] for key in entry.get("published", [])),
                tuple(findings),
                entry.get("figure", ""),
            )
        )
    return made


def _claim_text(text: str, published: Mapping[str, Published]) -> Markup:
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\{([\w.]+)\}", lambda m: published[m[1]].__html__(), safe))


def view(rows: Sequence[Row], figures: Mapping[str, Any], published: Mapping[str, Published]) -> dict[str, Any]:
    """What the article's template shows."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    listed = []
    for row in rows:
        slot = figures.get(row.figure)
        listed.append(
            {
                "number": row.number,
                "claim": row.claim,
                "rule": row.rule,
                "findings": row.findings,
                "needs": "" if row.findings else row.needs,
                "figure": slot if slot is not None and slot.ok and slot.placed else None,
                "verdicts": [
                    {"name": v, "slug": v.split(" here")[0].replace(" ", "-")} for v in (row.verdict, *row.also)
                ],
            }
        )
    return {
        "rows": listed,
        "counts": [
            {
                "fact": Markup('<data class="claim" value="{0}" data-claim="ledger.{1}">{0}</data>').format(
                    n, verdict.replace(" ", "-")
                ),
                "label": verdict,
            }
            for verdict, n in counts.items()
        ],
    }
