"""What the article may say: claims of this machine and of receipts, published numbers, constants of the source.

A number reaches the page in one way only: through a :class:`Fact`, which knows the claims it was made from and
renders itself as a ``<data>`` element that carries their ids. The linter refuses any other digit in the prose.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from hiraishin import paths
from hiraishin.errors import UserError

if TYPE_CHECKING:
    from hiraishin.claims import Claim
    from hiraishin.results import ResultSet

Number = int | float

_SUFFIX = {"x": "×", "ratio": "×", "ms": " ms", "GB/s": " GB/s", "tokens/s": " tok/s", "GB": " GB", "s": " s"}


@dataclass(frozen=True)
class Fact:
    """One number of the page: its value, its unit, and the claims it was computed from (at least one)."""

    value: Number | None
    unit: str
    claims: tuple[Claim, ...]
    how: str = ""

    def __html__(self) -> Markup:
        return render_number(self.value, self.unit, kind="claim", attributes=self._attributes())

    def plain(self, digits: int = 3) -> Markup:
        """The number alone, without its unit."""
        return render_number(self.value, "", kind="claim", attributes=self._attributes(), digits=digits)

    def times(self, digits: int = 2) -> Markup:
        """The number as a ratio with a fixed count of decimals, e.g. ``1.64×``."""
        return render_number(self.value, "x", kind="claim", attributes=self._attributes(), decimals=digits)

    def percent(self, digits: int = 0) -> Markup:
        """The number, a share, in percent."""
        value = None if self.value is None else self.value * 100
        return render_number(value, "%", kind="claim", attributes=self._attributes(), decimals=digits)

    def terse(self) -> Markup:
        """As it is, without the words that a row and a column of a table already say."""
        attributes = {k: v for k, v in self._attributes().items() if k != "title"}
        return render_number(self.value, "", kind="claim", attributes=attributes)

    def _attributes(self) -> dict[str, str]:
        first = self.claims[0]
        builds = sorted({c.build for c in self.claims if c.build})
        shared = {k: v for k, v in first.params.items() if all(c.params.get(k) == v for c in self.claims)}
        attributes = {
            "data-claim": " ".join(sorted({c.id for c in self.claims})),
            "data-build": " ".join(builds),
            "data-params": json.dumps(shared, sort_keys=True, ensure_ascii=True, separators=(",", ":")),
            "title": self._title(builds, shared),
        }
        if self.how:
            attributes["data-how"] = f"{self.how} of {len(self.claims)}"
        return {k: v for k, v in attributes.items() if v and v != "{}"}

    def _title(self, builds: Sequence[str], shared: Mapping[str, Any]) -> str:
        names = ", ".join(sorted({c.id for c in self.claims}))
        where = "; ".join([*builds, *(f"{k} {v}" for k, v in shared.items())])
        how = f"{self.how} of {len(self.claims)}: " if self.how and len(self.claims) > 1 else ""
        detail = self.claims[0].detail if len(self.claims) == 1 else ""
        return " | ".join(part for part in (f"{how}{names}", where, detail) if part)


@dataclass(frozen=True)
class Book:
    """All claims of one run: the one this report is about, or a receipt."""

    name: str
    label: str
    machine: Mapping[str, Any]
    claims: tuple[Claim, ...]
    results: ResultSet | None = None
    missing: list[str] = field(default_factory=list)
    """Ids that a page asked for and that this run does not hold, in the order they were asked for."""

    def find(self, id: str, build: str | None = None, **params: Any) -> list[Claim]:
        """Claims with that id, build and parameters; a list or tuple as a parameter means any of its members."""

        def fits(claim: Claim) -> bool:
            if claim.id != id or (build is not None and claim.build != build):
                return False
            for name, wanted in params.items():
                found = claim.params.get(name)
                if found not in wanted if isinstance(wanted, (list, tuple, set, frozenset)) else found != wanted:
                    return False
            return True

        return [c for c in self.claims if fits(c)]

    def fact(self, id: str, build: str | None = None, how: str = "", **params: Any) -> Fact | None:
        """The claim as a fact, or ``None`` when this run has none.

        With several matching claims ``how`` must say how to make one number of them (``min``, ``max``, ``sum``,
        ``count``); claims without a value (null) are left out of ``min``, ``max`` and ``sum``.

        Raises:
            LookupError: several claims match, they disagree, and ``how`` is empty.
        """
        found = self.find(id, build, **params)
        if not found:
            return None
        if how:
            numbers = [c.value for c in found if c.value is not None]
            if how == "count":
                return Fact(len(found), "", tuple(found), how)
            value: Number | None = None
            if numbers:
                value = sum(numbers) if how == "sum" else min(numbers) if how == "min" else max(numbers)
            return Fact(value, found[0].unit, tuple(found), how)
        if len({c.value for c in found}) > 1:
            raise LookupError(f"{len(found)} claims {id!r} match {build or 'any build'} {params}; say how to join them")
        return Fact(found[0].value, found[0].unit, tuple(found))

    # What templates call -------------------------------------------------------------------------------------

    def value(self, id: str, build: str | None = None, how: str = "", **params: Any) -> Number | None:
        """The bare number for a template's conditions; ``None`` when absent or null."""
        fact = self.fact(id, build, how, **params)
        return None if fact is None else fact.value

    def has(self, id: str, build: str | None = None, **params: Any) -> bool:
        """Whether some claim of that description exists, null or not."""
        return bool(self.find(id, build, **params))

    def claim(self, id: str, build: str | None = None, how: str = "", **params: Any) -> Fact | Markup:
        """What a template prints: the fact, or a visible note in place that names what is missing."""
        fact = self.fact(id, build, how, **params)
        if fact is not None:
            return fact
        return self.note_missing(id)

    def note_missing(self, id: str) -> Markup:
        """A visible note that a result is missing; remembered for the report's own list."""
        if id not in self.missing:
            self.missing.append(id)
        return Markup('<span class="missing">[not measured: <code>{}</code>]</span>').format(id)

    def gaps(self, *ids: str) -> list[str]:
        """Those of the ids that this run lacks; remembered for the report's own list."""
        absent = [i for i in ids if not self.has(i)]
        self.missing.extend(i for i in absent if i not in self.missing)
        return absent


def ratio(top: Fact | Number, bottom: Fact | Number) -> Fact | None:
    """One fact over another; keeps the claims of both. ``None`` when a side is null or the divisor is 0."""
    a = top.value if isinstance(top, Fact) else top
    b = bottom.value if isinstance(bottom, Fact) else bottom
    if a is None or b is None or b == 0:
        return None
    claims = tuple(c for side in (top, bottom) if isinstance(side, Fact) for c in side.claims)
    return Fact(a / b, "x", claims, "ratio")


def format_number(value: Number | None, unit: str = "", *, digits: int = 3, decimals: int | None = None) -> str:
    """A number for the page: ``digits`` significant digits (or fixed ``decimals``), thousands apart, its unit.

    Integers are never rounded; an exact zero is ``0``; null is ``none``; NaN and infinities are named.
    """
    suffix = _SUFFIX.get(unit, "%" if unit == "%" else "")
    if value is None:
        return "none"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if decimals is not None:
        text = f"{value:.{decimals}f}"
    elif float(value).is_integer():
        text = f"{int(value):,}"
    elif abs(value) >= 10 ** (digits - 1):
        text = f"{value:,.0f}" if digits <= 3 and abs(value) >= 1000 else f"{value:.{digits}g}"
    elif abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa}×10{_superscript(int(exponent))}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace(",", "\u202f").replace("-", "−") + suffix


def _superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def render_number(
    value: Number | None,
    unit: str,
    *,
    kind: str,
    attributes: Mapping[str, str],
    digits: int = 3,
    decimals: int | None = None,
) -> Markup:
    """A ``<data>`` element: the human form inside, the exact value and where it comes from in attributes."""
    text = format_number(value, unit, digits=digits, decimals=decimals)
    raw = "" if value is None else repr(value)
    rest = "".join(f" {name}={_quoted(content)}" for name, content in attributes.items())
    return Markup(f'<data class="{escape(kind)}" value="{escape(raw)}"{rest}>{escape(text)}</data>')


def _quoted(content: str) -> str:
    """An attribute's value in quotes; in apostrophes where it holds quotes, as JSON does."""
    if '"' in content and "'" not in content:
        return "'" + content.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") + "'"
    return f'"{escape(content)}"'


@dataclass(frozen=True)
class Published:
    """A number that this project did not measure: the post's, or a constant of the source."""

    key: str
    value: Number
    unit: str
    about: str
    kind: str
    where: str
    row: int = 0

    def __html__(self) -> Markup:
        return self._render(self.unit)

    def plain(self) -> Markup:
        """The number alone, without its unit."""
        return self._render("")

    def percent(self, decimals: int = 1) -> Markup:
        """The number, a share, in percent."""
        return render_number(self.value * 100, "%", kind=self.kind, attributes=self._attributes(), decimals=decimals)

    def times(self, decimals: int = 2) -> Markup:
        """The number as a ratio with a fixed count of decimals."""
        return render_number(self.value, "x", kind=self.kind, attributes=self._attributes(), decimals=decimals)

    def _attributes(self) -> dict[str, str]:
        return {"data-key": self.key, "title": f"{self.about} ({self.where})"}

    def _render(self, unit: str) -> Markup:
        return render_number(self.value, unit, kind=self.kind, attributes=self._attributes())


def load_published(path: Path | None = None) -> dict[str, Published]:
    """The post's numbers by key.

    Raises:
        UserError: the file is missing or malformed.
    """
    document = _toml(path or paths.published_dir() / "post.toml")
    where = f"published: {document['source']['machine']}, {document['source']['model']}"
    return {
        key: Published(key, n["value"], n["unit"], n["about"], "published", where, n["row"])
        for key, n in document["numbers"].items()
    }


def load_constants(path: Path | None = None) -> dict[str, Published]:
    """Constants of the source by key.

    Raises:
        UserError: the file is missing or malformed.
    """
    document = _toml(path or paths.published_dir() / "source.toml")
    return {
        key: Published(key, n["value"], n["unit"], n["about"], "source", n["where"])
        for key, n in document["constants"].items()
    }


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"{path.name} cannot be read: {error}", "It is part of the project: restore it with git."
        ) from error


def machine_label(machine: Mapping[str, Any], default: str) -> str:
    """A short name for a machine: its GPU when it has one, else its processor, else ``default``."""
    for name in ("gpu", "gpu_name", "cpu", "cpu_model", "processor"):
        value = machine.get(name)
        if isinstance(value, Mapping):
            value = value.get("name") or value.get("model")
        if isinstance(value, (list, tuple)) and value:
            value = value[0].get("name") if isinstance(value[0], Mapping) else value[0]
        if isinstance(value, str) and value.strip():
            return value.strip()
    return default


def dedupe(names: Iterable[str]) -> list[str]:
    """The names without repetitions, in order."""
    return list(dict.fromkeys(names))


def is_close(a: float, b: float) -> bool:
    """Equal but for rounding."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
