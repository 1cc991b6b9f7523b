"""An executed notebook as a page: nbconvert's filters, our own template, and nothing that an output can smuggle in.

Outputs may hold prompts and generated text, so they are untrusted: text is escaped, control characters are shown as
symbols, very long text is cut with a note, HTML passes an allow-list, and images become files shown by ``<img>``,
where a script inside an SVG never runs.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bleach  # type: ignore[import-untyped]
import nbformat
from bs4 import BeautifulSoup
from markupsafe import Markup
from nbconvert.filters.ansi import ansi2html
from nbconvert.filters.highlight import Highlight2HTML
from nbconvert.filters.markdown_mistune import markdown2html_mistune

from hiraishin import paths
from hiraishin.report.text import visible

_TAGS = frozenset(
    "a b blockquote br caption code col colgroup dd del div dl dt em h1 h2 h3 h4 h5 h6 hr i kbd li mark ol p pre s small span "
    "strong sub sup table tbody td tfoot th thead tr u ul var data time bdi details summary figure figcaption".split()
)
_ACTIVE_SVG = re.compile(
    r"<script\b|<foreignObject\b|\son[a-z]+\s*=|<!ENTITY|href\s*=\s*[\"'](?!#|data:image/)|url\(\s*[\"']?(?!#)",
    re.IGNORECASE,
)

_ATTRIBUTES: dict[str, list[str]] = {
    "*": ["class", "title", "lang", "dir"],
    "a": ["href"],
    "th": ["scope", "colspan", "rowspan"],
    "td": ["colspan", "rowspan"],
    "data": ["value"],
    "time": ["datetime"],
    "ol": ["start"],
}


@dataclass
class Cell:
    """One cell of a page: ``kind`` is ``markdown`` or ``code``; ``body`` and every output are safe HTML."""

    kind: str
    body: Markup
    outputs: list[Markup] = field(default_factory=list)
    failed: bool = False
    injected: bool = False
    count: int | None = None


@dataclass
class NotebookPage:
    """What the notebook template shows, and the image files it refers to (name to bytes)."""

    title: str
    cells: list[Cell]
    files: dict[str, bytes]


def read_notebook(path: Path, title: str, image_prefix: str) -> NotebookPage:
    """Turn an executed notebook into safe HTML pieces.

    Args:
        path: the executed ``.ipynb``.
        title: the page's title, used where an image brings no alt text.
        image_prefix: start of the names of image files (the notebook's stem).
    """
    document = nbformat.reads(without_places(path.read_text(encoding="utf-8")), as_version=4)  # type: ignore[no-untyped-call]
    files: dict[str, bytes] = {}
    cells: list[Cell] = []
    for index, cell in enumerate(document.cells):
        if "papermill-error-cell-tag" in cell.metadata.get("tags", []):
            continue  # papermill's own note; the page has a better one
        if cell.cell_type == "markdown":
            body = _markdown(cell.source, first=index == 0)
            if body.strip():
                cells.append(Cell("markdown", body))
        elif cell.cell_type == "code":
            if not cell.source.strip():
                continue
            outputs = list(_outputs(cell.get("outputs", []), title, f"{image_prefix}-{index + 1}", files))
            failed = any(o.get("output_type") == "error" for o in cell.get("outputs", []))
            injected = "injected-parameters" in cell.metadata.get("tags", [])
            cells.append(Cell("code", _highlight(cell.source), outputs, failed, injected, cell.get("execution_count")))
    return NotebookPage(title, cells, files)


def without_places(text: str) -> str:
    """The text of a notebook file without the folders of the machine it ran on, for a site that others see.

    The project's folder is left out, and those outside it are shown by what leads there.
    """
    places = {f"{paths.ROOT}/": "", str(paths.ROOT): ".", str(paths.home()): "$HIRAISHIN_HOME"}
    if paths.home().is_relative_to(paths.ROOT):
        del places[str(paths.home())]
    user = os.path.expanduser("~")
    if len(user) > 1 and user != "~":
        places[user] = "~"
    for place in sorted(places, key=len, reverse=True):
        after = "" if place.endswith("/") else r"(?![\w.-])"
        for written in {place, json.dumps(place)[1:-1]}:
            text = re.sub(r"(?<![\w.~-])" + re.escape(written) + after, lambda _, p=place: places[p], text)  # type: ignore[misc]
    return text


def preformatted(text: str, kind: str = "text", label: str = "Output") -> Markup:
    """Untrusted text in a scrolling, bidi-isolated ``<pre>``."""
    shown = re.sub(r"\x1b(?!\[)", "␛", visible(text))
    return Markup('<pre class="output {}" tabindex="0" aria-label="{}"><bdi>{}</bdi></pre>').format(
        kind,
        label,
        Markup(ansi2html(shown)),  # type: ignore[no-untyped-call]
    )


def sanitize(html: str) -> Markup:
    """HTML through the allow-list: what is not on it is shown as text."""
    cleaner = bleach.Cleaner(tags=_TAGS, attributes=_ATTRIBUTES, protocols={"http", "https", "mailto"}, strip=False)
    without = re.sub(r"<(style|script)\b.*?</\1\s*>", "", html, flags=re.DOTALL | re.IGNORECASE)
    return Markup(cleaner.clean(visible(without, 400_000)))


def _markdown(source: str, *, first: bool) -> Markup:
    html = sanitize(str(markdown2html_mistune(source)))
    soup = BeautifulSoup(str(html), "html.parser")
    for anchor in soup.select("a.anchor-link"):
        anchor.decompose()
    for heading in soup.find_all("h1"):
        if first:
            heading.decompose()  # the page's own heading is the notebook's title
        else:
            heading.name = "h2"
    for link in soup.find_all("a"):
        target = str(link.get("href", ""))
        if target.endswith(".ipynb") and "/" not in target:
            link["href"] = target.removesuffix(".ipynb") + ".html"
        else:
            link.unwrap()  # a page of ours refers to nothing but its siblings
    return Markup(str(soup))


def _highlight(source: str) -> Markup:
    html = Highlight2HTML(pygments_lexer="python")(source)  # type: ignore[no-untyped-call]
    return Markup(html.replace("<pre>", '<pre tabindex="0" aria-label="Code">', 1))


def _outputs(outputs: Iterable[Mapping[str, Any]], title: str, stem: str, files: dict[str, bytes]) -> Iterable[Markup]:
    for number, output in enumerate(outputs, 1):
        kind = output.get("output_type")
        if kind == "stream":
            shown = visible("".join(output.get("text", "")))
            if shown.strip() and not _is_progress(output):
                yield preformatted(shown, str(output.get("name", "stdout")), f"Printed output {stem} {number}")
        elif kind == "error":
            trace = "\n".join(output.get("traceback", [])) or f"{output.get('ename')}: {output.get('evalue')}"
            yield preformatted(trace, "error", f"Error {stem} {number}")
        elif kind in ("display_data", "execute_result"):
            shown_data = _data(output, title, f"{stem}-{number}", files)
            if shown_data is not None:
                yield shown_data


def _is_progress(output: Mapping[str, Any]) -> bool:
    text = "".join(output.get("text", ""))
    return output.get("name") == "stderr" and bool(re.search(r"\d+%\|", text))


def _data(output: Mapping[str, Any], title: str, stem: str, files: dict[str, bytes]) -> Markup | None:
    data: Mapping[str, Any] = output.get("data", {})
    metadata: Mapping[str, Any] = output.get("metadata", {})
    for mime, suffix in (("image/svg+xml", "svg"), ("image/png", "png"), ("image/jpeg", "jpg")):
        if mime in data:
            content = "".join(data[mime])
            if suffix == "svg" and _ACTIVE_SVG.search(content):
                return preformatted(
                    "[a picture that brings a script or refers outside itself is not shown]", "error", stem
                )
            try:
                files[f"{stem}.{suffix}"] = content.encode() if suffix == "svg" else base64.b64decode(content)
            except (binascii.Error, ValueError):
                continue
            alt = (
                metadata.get(mime, {}).get("alt")
                or metadata.get("alt")
                or _plain_text(data)
                or f"Output of the notebook {title}"
            )
            dark = metadata.get(mime, {}).get("dark") or metadata.get("dark")
            if suffix == "svg" and isinstance(dark, str) and dark.lstrip().startswith("<"):
                files[f"{stem}.dark.svg"] = dark.encode()
                return Markup(
                    '<div class="image"><picture><source media="screen and (prefers-color-scheme: dark)" srcset="{}.dark.svg">'
                    '<img src="{}.svg" alt="{}" loading="lazy"></picture></div>'
                ).format(f"files/{stem}", f"files/{stem}", alt)
            return Markup('<div class="image"><img src="files/{}.{}" alt="{}" loading="lazy"></div>').format(
                stem, suffix, alt
            )
    if "text/html" in data:
        return _table(sanitize("".join(data["text/html"])), stem)
    if "text/markdown" in data:
        return Markup('<div class="output markdown">{}</div>').format(
            _markdown("".join(data["text/markdown"]), first=False)
        )
    if "application/vnd.jupyter.widget-view+json" in data:
        return None  # sliders live in JupyterLab; the notebook shows a static equivalent beside them
    if "text/plain" in data:
        return preformatted("".join(data["text/plain"]), "result", f"Result {stem}")
    return None


def _plain_text(data: Mapping[str, Any]) -> str:
    text = "".join(data.get("text/plain", "")).strip()
    return "" if text.startswith("<") else text[:600]


def _table(html: Markup, stem: str) -> Markup:
    soup = BeautifulSoup(str(html), "html.parser")
    for header in soup.find_all("th"):
        if not header.get_text(strip=True):
            header.name = "td"
            header.attrs.pop("scope", None)
        elif not header.get("scope"):
            header["scope"] = "col" if header.find_parent("thead") else "row"
    for table in soup.find_all("table"):
        table.attrs.pop("border", None)
    return Markup('<div class="output html scroll" tabindex="0" role="group" aria-label="{}">{}</div>').format(
        f"Result {stem}", Markup(str(soup))
    )
