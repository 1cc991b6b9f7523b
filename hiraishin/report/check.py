"""The linter for a finished report: what a page must never do, and what every number and figure must bring.

Checked: nothing refers outside the folder; no script; every picture has alt text; ids are unique and every link and
label resolves; every figure has its data and its provenance; every digit of the article's prose stands in an
element that names its claim, and that claim has that value; the folder keeps to its size.
"""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from bs4 import BeautifulSoup
from bs4.element import Comment, Doctype, NavigableString, Tag

SIZE_BUDGET = 5_000_000
"""Bytes of a whole report."""

LARGEST_NAMED = 5
"""Files that are named when a report is over its budget."""

MARKER = "report.json"

_NUMBER_HOMES = ("data", "code", "pre", "time", "bdi", "script", "style")
_NUMBER_CLASSES = frozenset({"figure-number", "caption", "name"})
_URL_ATTRIBUTES = ("href", "src", "srcset", "action", "poster", "data", "xlink:href", "formaction", "cite")
_OUTSIDE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """One finding: the file it is in (relative to the report) and what is wrong."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def check_site(folder: Path, *, finished: bool = True) -> list[Problem]:
    """Every problem of a report folder, in file order; an empty list means that it is sound.

    Args:
        folder: the report's root, the folder that holds ``index.html``.
        finished: whether the marker of a finished report must be there.
    """
    if not (folder / "index.html").is_file():
        return [Problem("index.html", "is missing: this folder holds no report")]
    problems: list[Problem] = []
    if finished and not (folder / MARKER).is_file():
        problems.append(Problem(MARKER, "is missing: the report was not finished"))
    pages = {path: _parse(path) for path in sorted(folder.rglob("*.html"))}
    ids = {path: _ids(soup) for path, soup in pages.items()}
    numbers = _Numbers(folder)
    for path, soup in pages.items():
        name = path.relative_to(folder).as_posix()
        found = [
            *_structure(soup, ids[path]),
            *_references(soup, path, folder, ids),
            *_pictures(soup),
            *_figures(soup, path, folder),
        ]
        if name == "index.html":
            found += [*_bare_numbers(soup), *numbers.check(soup)]
        problems += [Problem(name, what) for what in found]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".css":
            problems += [Problem(name, what) for what in _style_sheet(path, folder)]
        elif path.suffix == ".svg":
            problems += [Problem(name, what) for what in _svg(path)]
    sizes = {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    size = sum(sizes.values())
    if size > SIZE_BUDGET:
        largest = sorted(sizes, key=lambda p: (-sizes[p], p))[:LARGEST_NAMED]
        named = ", ".join(f"{p.relative_to(folder).as_posix()} {sizes[p]:,}" for p in largest)
        problems.append(Problem(".", f"takes {size:,} bytes, more than {SIZE_BUDGET:,}; the largest files: {named}"))
    return problems


def _parse(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def _ids(soup: BeautifulSoup) -> list[str]:
    return [str(tag["id"]) for tag in soup.find_all(id=True)]


def _structure(soup: BeautifulSoup, ids: list[str]) -> Iterator[str]:
    for id in sorted({i for i in ids if ids.count(i) > 1}):
        yield f"the id {id!r} is used {ids.count(id)} times"
    for tag in soup.find_all(True):
        for attribute in ("aria-labelledby", "aria-describedby", "for"):
            for target in str(tag.get(attribute) or "").split():
                if target not in ids:
                    yield f"<{tag.name} {attribute}> names the id {target!r}, which is not there"
        if tag.name == "script" or any(a.lower().startswith("on") for a in tag.attrs):
            yield f"<{tag.name}> brings a script"
    html = soup.find("html")
    if not isinstance(html, Tag) or not html.get("lang"):
        yield "<html> has no lang"
    if soup.title is None or not soup.title.get_text(strip=True):
        yield "there is no title"
    if len(soup.find_all("h1")) != 1:
        yield f"there are {len(soup.find_all('h1'))} first-level headings, not one"
    if "\x00" in str(soup):
        yield "there is a NUL in the text"


def _references(soup: BeautifulSoup, path: Path, folder: Path, ids: Mapping[Path, list[str]]) -> Iterator[str]:
    for tag in soup.find_all(True):
        for attribute in _URL_ATTRIBUTES:
            value = tag.get(attribute)
            if value is None or (attribute == "data" and tag.name != "object"):
                continue
            urls = (
                [part.split()[0] for part in str(value).split(",") if part.split()]
                if attribute == "srcset"
                else [str(value)]
            )
            for url in urls:
                yield from _reference(tag.name, attribute, url, path, folder, ids)
        if "url(" in str(tag.get("style") or ""):
            yield f"<{tag.name} style> refers to a file"
        if tag.name == "meta" and "refresh" in str(tag.get("http-equiv") or "").lower():
            yield "<meta http-equiv=refresh> sends the reader elsewhere"


def _reference(
    tag: str, attribute: str, url: str, path: Path, folder: Path, ids: Mapping[Path, list[str]]
) -> Iterator[str]:
    if _OUTSIDE.match(url):
        if not (url.startswith("data:image/") and tag in ("img", "source")):
            yield f"<{tag} {attribute}> refers outside the report: {url[:80]}"
        return
    if url.startswith("/"):
        yield f"<{tag} {attribute}> starts at the root of a disk or host: {url[:80]}"
        return
    name, _, fragment = url.partition("#")
    target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
    if folder.resolve() not in target.resolve().parents or not target.is_file():
        yield f"<{tag} {attribute}> leads nowhere: {url[:80]}"
        return
    if fragment:
        known = next((found for page, found in ids.items() if page.resolve() == target.resolve()), [])
        if unquote(fragment) not in known:
            yield f"<{tag} {attribute}> names a place that is not there: {url[:80]}"


def _pictures(soup: BeautifulSoup) -> Iterator[str]:
    for picture in soup.find_all("img"):
        alt = str(picture.get("alt") or "").strip()
        if not alt:
            yield f"the picture {picture.get('src')} has no alt text"
        elif re.fullmatch(r"[\w./-]+\.(?:svg|png|jpe?g)", alt):
            yield f"the alt text of {picture.get('src')} is a file name"
    for drawing in soup.find_all("svg"):
        if not drawing.get("aria-label") and drawing.find("title") is None and drawing.get("aria-hidden") != "true":
            yield "a drawing in the page has neither title nor label"


def _figures(soup: BeautifulSoup, path: Path, folder: Path) -> Iterator[str]:
    for figure in soup.find_all("figure"):
        name = figure.get("id") or "without id"
        if figure.find("figcaption") is None:
            yield f"the figure {name} has no caption"
        links = [str(a["href"]) for a in figure.find_all("a", href=True)]
        if not any(link.endswith((".csv", ".csv.gz")) for link in links):
            yield f"the figure {name} has no data"
        records = [link for link in links if link.endswith(".json")]
        if not records:
            yield f"the figure {name} has no provenance"
        for link in records:
            try:
                record = json.loads((path.parent / unquote(link)).read_text(encoding="utf-8"))
                lacking = [key for key in ("figure", "commit", "machine", "results") if key not in record]
                if lacking:
                    yield f"the provenance of figure {name} does not say: {', '.join(lacking)}"
            except (OSError, ValueError) as error:
                yield f"the provenance of figure {name} cannot be read: {error}"


def _bare_numbers(soup: BeautifulSoup) -> Iterator[str]:
    main = soup.find("main")
    if not isinstance(main, Tag):
        yield "there is no main element"
        return
    for text in main.find_all(string=True):
        if not re.search(r"\d", text) or isinstance(text, (Comment, Doctype)):
            continue
        if not _has_home(text):
            shown = " ".join(text.split())
            yield f"a number without a claim: {shown[:90]!r}"


def _has_home(text: NavigableString) -> bool:
    return any(
        parent.name in _NUMBER_HOMES or _NUMBER_CLASSES & set(parent.get("class") or []) for parent in text.parents
    )


def _style_sheet(path: Path, folder: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if "@import" in text:
        yield "imports another sheet"
    for url in re.findall(r"url\(\s*[\"']?([^\"')]+)", text):
        if _OUTSIDE.match(url) and not url.startswith("data:"):
            yield f"refers outside the report: {url[:80]}"
        elif not url.startswith("data:") and not (path.parent / url).is_file():
            yield f"refers to a file that is not there: {url[:80]}"


def _svg(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if re.search(r"<script\b|\son[a-z]+\s*=", text, re.IGNORECASE):
        yield "brings a script"
    for url in re.findall(r"(?:xlink:)?href\s*=\s*[\"']([^\"']+)", text):
        if not url.startswith(("#", "data:")):
            yield f"refers outside itself: {url[:80]}"


class _Numbers:
    """Holds the report's own data against the numbers in its prose."""

    def __init__(self, folder: Path) -> None:
        self.claims: list[dict[str, Any]] = []
        for path in sorted((folder / "data").glob("claims*.json.gz")):
            self.claims += json.loads(gzip.decompress(path.read_bytes()))["claims"]
        self.ids = {c["id"] for c in self.claims}
        self.known: dict[str, dict[str, Any]] = {}
        for name, table in (("post.toml", "numbers"), ("source.toml", "constants")):
            path = folder / "data" / name
            if path.is_file():
                self.known |= tomllib.loads(path.read_text(encoding="utf-8"))[table]

    def check(self, soup: BeautifulSoup) -> Iterator[str]:
        for tag in soup.find_all("data"):
            kinds = set(tag.get("class") or [])
            if "claim" in kinds:
                yield from self._claim(tag)
            elif kinds & {"published", "source"}:
                entry = self.known.get(str(tag.get("data-key")))
                if entry is None:
                    yield f"{tag.get_text()!r} is published under no key"
                elif not _same(str(tag.get("value")), (entry["value"], entry["value"] * 100)):
                    yield f"{tag.get_text()!r} is not the published {tag.get('data-key')}"
            else:
                yield f"{tag.get_text()!r} is of no kind"

    def _claim(self, tag: Tag) -> Iterator[str]:
        ids = str(tag.get("data-claim") or "").split()
        if not ids:
            yield f"{tag.get_text()!r} names no claim"
            return
        if tag.get("data-result") or all(i.startswith("ledger.") for i in ids) or tag.get("data-param"):
            return
        for id in ids:
            if id not in self.ids:
                yield f"{tag.get_text()!r} names the claim {id!r}, which no run makes"
                return
        how = str(tag.get("data-how") or "").split(" ")[0]
        if how in ("ratio", "difference"):
            return
        builds = str(tag.get("data-build") or "").split()
        shared = json.loads(str(tag.get("data-params") or "{}"))
        values = [
            c["value"]
            for c in self.claims
            if c["id"] in ids
            and (not builds or c["build"] in builds)
            and all(c["params"].get(k) == v for k, v in shared.items())
        ]
        numbers = [v for v in values if v is not None]
        value = str(tag.get("value"))
        expected: Iterable[Any] = values
        if how in ("min", "max") and numbers:
            expected = numbers
        elif how in ("sum", "count"):
            return  # parts of it may belong to several runs; its ids and parameters were checked above
        if not _same(value, [*expected, *(v * 100 for v in numbers)]):
            yield f"{tag.get_text()!r} is not a value of {' '.join(ids)}"


def _same(text: str, values: Iterable[Any]) -> bool:
    for value in values:
        if value is None and text == "":
            return True
        try:
            if value is not None and abs(float(text) - float(value)) <= 1e-9 * max(1.0, abs(float(value))):
                return True
        except ValueError:
            continue
    return False
