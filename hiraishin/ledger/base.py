"""What the ledger's rows are made of: verdicts, findings, and what a row's function works with."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hiraishin.errors import UserError
from hiraishin.report.facts import Book, Fact, Published, format_number

REPRODUCED, DIFFERS, EXPLAINED, NOT_TESTABLE = "reproduced", "differs", "explained", "not testable here"
VERDICTS = (REPRODUCED, DIFFERS, EXPLAINED, NOT_TESTABLE)


@dataclass(frozen=True)
class Finding:
    """What one run (or arithmetic, when ``machine`` is empty) says about a row: its verdict and the evidence."""

    verdict: str
    text: Markup
    machine: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the ledger with its verdict and everything that was found."""

    number: int
    claim: Markup
    rule: str
    needs: str
    published: tuple[Published, ...]
    findings: tuple[Finding, ...]
    figure: str = ""

    @property
    def verdict(self) -> str:
        """The strongest of the findings: measured before explained, and seen somewhere before not seen elsewhere."""
        found = {f.verdict for f in self.findings}
        return next((v for v in VERDICTS if v in found), NOT_TESTABLE)

    @property
    def also(self) -> tuple[str, ...]:
        """Other verdicts, of other machines."""
        found = {f.verdict for f in self.findings}
        return tuple(v for v in VERDICTS if v in found and v != self.verdict)

    def as_json(self) -> dict[str, Any]:
        """Plain data for the download."""
        return {
            "number": self.number,
            "claim": plain_text(self.claim),
            "rule": self.rule,
            "needs": self.needs,
            "published": {p.key: p.value for p in self.published},
            "verdict": self.verdict,
            "findings": [
                {"machine": f.machine, "verdict": f.verdict, "text": plain_text(f.text)} for f in self.findings
            ],
        }


@dataclass
class Judge:
    """What a row's function works with: one book and the published numbers."""

    book: Book
    published: Mapping[str, Published]
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether this run computed on a GPU."""
        backends = {r.inputs.get("backend") for r in self.results()} - {None}
        layers = {r.inputs.get("gpu_layers") for r in self.results()} - {None, 0}
        return bool(self.book.machine.get("gpu")) and (bool(layers) or "cuda" in backends)

    def results(self, kind: str | None = None, **inputs: Any) -> list[Any]:
        """Stored results of a kind with the given inputs."""
        if self.book.results is None:
            return []
        if kind is None:
            return list(self.book.results.results)
        return list(self.book.results.of(kind, **inputs))

    def fact(self, id: str, build: str | None = None, how: str = "", **params: Any) -> Fact | None:
        """A fact with a value, or ``None``."""
        fact = self.book.fact(id, build, how, **params)
        return fact if fact is not None and fact.value is not None else None

    def measured(self, value: float | int, name: str, results: Sequence[Any], unit: str = "") -> Markup:
        """A number computed here from stored results, as an element that names them."""
        keys = " ".join(r.key[:12] for r in results[:20])
        return Markup('<data class="claim" value="{}" data-claim="ledger.{}" data-result="{}">{}</data>').format(
            value, name, keys, format_number(value, unit)
        )


Test = Callable[[Judge], Finding | None]
Arithmetic = Callable[[Mapping[str, Published]], Finding]
TESTS: dict[str, Test] = {}
ARITHMETIC: dict[str, Arithmetic] = {}


def row_test(function: Test) -> Test:
    """Register the function of a row that asks a run."""
    TESTS[function.__name__] = function
    return function


def row_arithmetic(function: Arithmetic) -> Arithmetic:
    """Register the function of a row that arithmetic decides."""
    ARITHMETIC[function.__name__] = function
    return function


def finding(yes: bool, text: str, *values: Any, **named: Any) -> Finding:
    """*Reproduced* or *differs*, with the evidence; values are escaped."""
    return Finding(REPRODUCED if yes else DIFFERS, Markup(text).format(*values, **named))


def computed(value: Any, name: str) -> Markup:
    """A number worked out while this page was made, from the source's arithmetic."""
    shown = format_number(value) if isinstance(value, (int, float)) else str(value)
    return Markup('<data class="claim" value="{}" data-claim="ledger.{}">{}</data>').format(value, name, shown)


def named(value: Any) -> Markup:
    """A name, in which digits need no claim."""
    return Markup('<span class="name">{}</span>').format(str(value))


def plain_text(markup: Markup) -> str:
    """The words without the elements."""
    return str(markup.striptags())


def read_toml(path: Path) -> dict[str, Any]:
    """A data file of the project.

    Raises:
        UserError: it is missing or malformed.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"{path.name} cannot be read: {error}", "It is part of the project: restore it with git."
        ) from error
