"""Rendering: the jinja2 environment, the article, the receipts, data and provenance pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hiraishin import paths
from hiraishin.report.audits import audits, predicted_right
from hiraishin.report.facts import Book, Published, format_number, machine_label
from hiraishin.report.grid import grids
from hiraishin.report.prices import POST_QUANT
from hiraishin.report.site import Download, FigureSlot, is_gpu
from hiraishin.report.story import Story
from hiraishin.report.words import arm_of, settings_words

PAGES = (
    {"name": "Article", "href": "index.html"},
    {"name": "Notebooks", "href": "notebooks/index.html"},
    {"name": "Receipts", "href": "receipts.html"},
    {"name": "Data", "href": "data.html"},
    {"name": "Provenance", "href": "provenance.html"},
)


@dataclass(frozen=True)
class Section:
    """A section of the article: its anchor, its heading, its template."""

    id: str
    title: str
    template: str


def sections(story: Story, *, further: bool) -> list[Section]:
    """The article's sections in reading order; headings claim only what was measured."""
    operation = "Nothing to locate" if story.stock_exact else "Which operation does it"
    zero = "What is left" if story.patched_differs else "Zero, and how it was checked"
    listed = [
        ("promise", "A promise with one condition"),
        ("order", "Addition has an order"),
        ("replay", "Replay the answer"),
        ("flips", "When rounding picks another word"),
        ("operation", operation),
        ("range", "The differences that wait"),
        ("patches", "One patch for each cause"),
        ("zero", zero),
        ("price", "What exactness costs"),
        ("speed", "Is it faster?"),
        ("gpu", "On a GPU"),
        *([("further", "Further figures")] if further else []),
        ("ledger", "The ledger"),
        ("receipts", "Receipts"),
        ("yours", "Your model, your GPU, your receipt"),
    ]
    return [Section(id, title, f"article/{id}.html.j2") for id, title in listed]


def environment() -> jinja2.Environment:
    """Autoescaping on, undefined names an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(paths.ROOT / "report" / "templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["trim_problem"] = lambda text, id: str(text).removeprefix(f"figure {id}: ")
    return made


class Writer:
    """Writes the pages of one site."""

    def __init__(self, stage: Path, commit: Mapping[str, Any]) -> None:
        self.stage = stage
        self.environment = environment()
        self.site = {
            "name": "hiraishin",
            "pages": PAGES,
            "commit": str(commit.get("commit") or "unknown"),
            "dirty": bool(commit.get("dirty")),
        }

    def page(self, template: str, href: str, **context: Any) -> None:
        """Render one page into the site."""
        root = "../" * href.count("/")
        html = self.environment.get_template(template).render(site=self.site, root=root, here_href=href, **context)
        target = self.stage / href
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(html.replace("\x00", "␀"), encoding="utf-8")

    def article(
        self,
        books: Sequence[Book],
        figures: Mapping[str, FigureSlot],
        receipt_figures: Mapping[str, Mapping[str, FigureSlot]],
        ledger: Mapping[str, Any],
        notebooks: Sequence[Any],
        failures: Sequence[str],
        published: Mapping[str, Published],
        constants: Mapping[str, Published],
    ) -> None:
        """The index. Sections are rendered in reading order, so that figures get their numbers in that order."""
        here = books[0]
        story = Story(here)
        named = _named_figures(self.environment)
        unplaced = [s for id, s in figures.items() if id not in named and s.ok]
        self.page(
            "index.html.j2",
            "index.html",
            here=here,
            books=books,
            story=story,
            sections=sections(story, further=bool(unplaced)),
            fig=lambda id: figures.get(id) or FigureSlot(id, known=False, problem="no such figure", anchor=f"fig-{id}"),
            unplaced=unplaced,
            gpus=gpu_chapters(books, receipt_figures),
            ledger=ledger,
            notebooks=notebooks,
            failures=failures,
            published=published,
            constants=constants,
        )

    def receipts(self, books: Sequence[Book]) -> None:
        """Every claim of every book, side by side."""
        self.page("receipts.html.j2", "receipts.html", books=books, groups=claim_groups(books))

    def data(self, downloads: Sequence[Download], figures: Mapping[str, FigureSlot]) -> None:
        """What can be downloaded."""
        self.page("data.html.j2", "data.html", downloads=downloads, figures=[f for f in figures.values() if f.ok])

    def provenance(self, books: Sequence[Book], missing: Sequence[str]) -> None:
        """Machines, builds, models and commits behind the results."""
        self.page("provenance.html.j2", "provenance.html", origins=[book_origin(b) for b in books], missing=missing)


def gpu_chapters(books: Sequence[Book], figures: Mapping[str, Mapping[str, FigureSlot]]) -> list[dict[str, Any]]:
    """One chapter a GPU: every setting that its receipts replayed, what is exact, what is not, and the figures.

    Each figure is shown once a chapter, from the receipt that has the most results.
    """
    chapters: dict[str, list[Book]] = {}
    for book in books:
        if is_gpu(book.machine) and book.results is not None:
            chapters.setdefault(machine_label(book.machine, book.name), []).append(book)
    made = []
    for name, members in chapters.items():
        rows = [row for book in members for row in setting_rows(book)]
        measured = [row for row in rows if row["left"] is not None]
        stories = [(book, Story(book)) for book in members]
        audited = [a for book in members if book.results for a in audits(book.results)]
        right, predicted = predicted_right(audited)
        shown: dict[str, FigureSlot] = {}
        for book in sorted(members, key=lambda b: -len(b.results.results if b.results else [])):
            for id, slot in figures.get(book.name, {}).items():
                if slot.ok and id not in shown:
                    shown[id] = slot
        made.append(
            {
                "name": name,
                "books": members,
                "rows": rows,
                "count": len(measured),
                "settings": counted(len(measured), "settings", members),
                "exact": counted(sum(row["left"].value == 0 for row in measured), "exact", members),
                "not_exact": [row for row in measured if row["left"].value],
                "stock_exact": [row for row in rows if row["stock"] is not None and row["stock"].value == 0],
                "stories": stories,
                "price": best_price([story for _, story in stories]),
                "ladders": [(story.model, ladder) for _, story in stories for ladder in story.ladders],
                "audits": audited,
                "audits_count": counted(len(audited), "audits", members, "audit.count"),
                "audits_right": counted(right, "predicted", members, "audit.count"),
                "audits_predicted": counted(predicted, "predictions", members, "audit.count") if predicted else None,
                "audits_causes": [a for a in audited if a.causes],
                "grids": [grid for book in members if book.results for grid in grids(book.results)],
                "synthetic": any(story.synthetic for _, story in stories),
                "figures": list(shown.values()),
            }
        )
    return made


def best_price(stories: Sequence[Story]) -> Story | None:
    """Of several receipts of one GPU the one whose price says most, by the order of :func:`hiraishin.report.prices.priced`."""
    found = [s for s in stories if s.price_wide and "patched" in s.price_wide]
    largest = max((s.weight_bytes for s in found), default=0)

    def rank(s: Story) -> tuple[Any, ...]:
        return (
            2 * s.weight_bytes >= largest,
            len(s.price_wide or {}),
            s.quant == POST_QUANT,
            s.weight_bytes,
            s.book.name,
        )

    return max(found, key=rank, default=None)


def counted(value: int, what: str, books: Sequence[Book], claim: str = "replay.differing_positions") -> Markup:
    """A count over receipts, as an element that names them."""
    return Markup('<data class="claim" value="{0}" data-claim="{3}" data-result="{1}: {2}">{0}</data>').format(
        value, what, " ".join(b.name for b in books), claim
    )


def setting_rows(book: Book) -> list[dict[str, Any]]:
    """What a book's replays say, a row for each weight type and way of making the context; stock beside patched."""
    keys: dict[str, Mapping[str, Any]] = {}
    for claim in book.claims:
        if claim.id == "replay.positions_compared" and claim.build in ("stock", "patched"):
            keys.setdefault(json.dumps(dict(claim.params), sort_keys=True), claim.params)
    model = Story(book).model_name
    rows = []
    for _, params in sorted(keys.items(), key=lambda item: _natural(item[0])):
        rows.append(
            {
                "model": model,
                "setting": params_words(params),
                "width": book.fact("replay.first_differing_width", "stock", "min", **params),
                "stock": book.fact("replay.differing_positions", "stock", "sum", **params),
                "stock_of": book.fact("replay.positions_compared", "stock", "sum", **params),
                "largest": book.fact("replay.max_abs_diff", "stock", "max", **params),
                "left": book.fact("replay.differing_positions", "patched", "sum", **params),
                "of": book.fact("replay.positions_compared", "patched", "sum", **params),
            }
        )
    return rows


def _named_figures(env: jinja2.Environment) -> set[str]:
    """Figure ids that the article's templates place themselves (string constants handed to ``fig``)."""
    import re

    named: set[str] = set()
    for name in env.list_templates(filter_func=lambda n: n.startswith("article/")):
        source = (paths.ROOT / "report" / "templates" / name).read_text(encoding="utf-8")
        if "fig(" in source:
            named.update(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)*)"', source))
    return named


def claim_groups(books: Sequence[Book]) -> list[dict[str, Any]]:
    """Claims by id; a row for each build and parameters, a cell for each book."""
    ids: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for book in books:
        for claim in book.claims:
            if claim.id.startswith("replay.width_"):
                continue  # one row a width and setting: thousands, in the data files
            key = (claim.build or "", json.dumps(dict(claim.params), sort_keys=True))
            ids.setdefault(claim.id, {}).setdefault(key, {})[book.name] = claim
    groups = []
    for id, rows in sorted(ids.items()):
        listed = []
        for (build, params), cells in sorted(
            rows.items(), key=lambda item: (_natural(item[0][1]), item[0][0] != "stock", item[0][0])
        ):
            shown = params_words(json.loads(params))
            listed.append({"build": build, "params": shown, "cells": [_cell(cells.get(b.name)) for b in books]})
        present = [b for b in books if any(c.id == id for c in b.claims)]
        keep = [i for i, b in enumerate(books) if b in present]
        for row in listed:
            row["cells"] = [row["cells"][i] for i in keep]
        groups.append(
            {
                "id": id,
                "rows": listed,
                "books": present,
                "unit": next(c.unit for b in books for c in b.claims if c.id == id),
            }
        )
    return groups


def _natural(text: str) -> list[tuple[int, str]]:
    import re

    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def params_words(params: Mapping[str, Any]) -> str:
    """A claim's parameters in words: settings as a reader knows them, the rest by name; what is unset is left out."""
    known = settings_words([params])
    rest = {k: v for k, v in params.items() if k not in ("flash_attn", "kv_type", "threads") and v is not None}
    quant = rest.pop("quant", None)
    words = [str(quant)] if quant is not None else []
    words += [f"{k.replace('_', ' ')} {'yes' if v is True else 'no' if v is False else v}" for k, v in rest.items()]
    return ", ".join([*words, *([known] if known else [])])


def _cell(claim: Any) -> Any:
    """A value of the receipts page; its row and section say which claim it is."""
    if claim is None:
        return "–"
    shown = format_number(claim.value, claim.unit)
    if claim.value is None or shown == repr(claim.value):
        return shown
    return Markup('<data value="{}">{}</data>').format(repr(claim.value), shown)


def book_origin(book: Book) -> dict[str, Any]:
    """What a provenance page says of one book: machine, builds, models, commits, counts."""
    results = book.results.results if book.results is not None else []
    builds: dict[tuple[str, str], dict[str, Any]] = {}
    models: dict[tuple[str, str], int] = {}
    commits: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for r in results:
        kinds[r.kind] = kinds.get(r.kind, 0) + 1
        key = (str(r.inputs.get("build", "")), str(r.inputs.get("fingerprint", "")))
        if key[0]:
            entry = builds.setdefault(
                key, {"name": key[0], "fingerprint": key[1], "count": 0, "arms": set(), "details": {}}
            )
            entry["count"] += 1
            entry["arms"].add(arm_of(r.inputs))
            for name, value in r.provenance.items():
                if isinstance(value, (str, int, float)) or value is None:
                    entry["details"].setdefault(name, value)
        model = (str(r.inputs.get("model", "")), str(r.inputs.get("model_sha256", "")))
        if model[0]:
            models[model] = models.get(model, 0) + 1
        commit = r.provenance.get("commit")
        commit = commit.get("commit") if isinstance(commit, Mapping) else commit
        commits[str(commit or "unknown")] = commits.get(str(commit or "unknown"), 0) + 1
    return {
        "name": book.name,
        "label": book.label,
        "machine": [
            (k.replace("_", " "), _machine_value(v)) for k, v in book.machine.items() if v not in (None, "", [], {})
        ],
        "builds": [{**b, "arms": ", ".join(sorted(b["arms"]))} for _, b in sorted(builds.items())],
        "models": [{"name": m, "sha256": s, "count": n} for (m, s), n in sorted(models.items())],
        "commits": sorted(commits.items()),
        "kinds": sorted(kinds.items()),
        "count": len(results),
    }


def _machine_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(_machine_value(v) for v in value)
    return str(value)


Echo = Callable[[str], None]
