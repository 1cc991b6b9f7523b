"""The report: notebooks executed, figures drawn, and an article in which every number comes from a result.

``build_report`` writes the whole site; ``check.check_site`` holds a finished one to its rules. The other modules: ``facts``
(numbers and where they come from), ``story`` (which sentences the facts allow), ``article`` (templates to pages),
``site`` (figures, downloads), ``folders``, ``execute`` and ``kernel_run`` (papermill), ``pages`` (notebooks to HTML).
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiraishin import paths

if TYPE_CHECKING:
    from hiraishin.profile import Profile
    from hiraishin.report.execute import Executed
    from hiraishin.report.facts import Book
    from hiraishin.report.site import FigureSlot, Units
    from hiraishin.results import ResultSet

LARGEST_NOTEBOOK = 120_000
"""Bytes of an executed notebook that the site still offers for download."""


@dataclass(frozen=True)
class ReportOutcome:
    """What became of a report: ``ok`` only if nothing failed; ``failures`` are one line each; ``index`` is the page."""

    ok: bool
    failures: list[str]
    index: Path
    missing: list[str] = field(default_factory=list)
    """Claim ids that the article asked for and this run does not hold; each is named on the page."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build_report(
    profile: Profile,
    results: ResultSet | None,
    out: Path,
    *,
    run_notebooks: bool = True,
    check: bool = True,
    notebooks: Sequence[Path] | None = None,
    parameters: dict[str, Any] | None = None,
    echo: Callable[[str], None] = _to_stderr,
) -> ReportOutcome:
    """Write the site for one profile's results. Whatever fails is named on the page and in the outcome; the rest is built.

    Args:
        profile: what was run.
        results: its results; ``None`` or empty gives a page that says that nothing was measured, and a failure.
        out: the site's folder; replaced as a whole, and only if it is a report (or empty, or absent).
        run_notebooks: whether to execute the notebooks (unchanged ones are not run again).
        check: whether to run the linter on what was built.
        notebooks: the notebooks, in reading order (default: all in ``notebooks/``).
        parameters: papermill parameters for all of them (default: the profile).
        echo: called with one line of progress at a time.

    Raises:
        UserError: the target is no report, or a folder cannot be written.
    """
    from hiraishin import figures as figure_registry
    from hiraishin import ledger, provenance
    from hiraishin.errors import UserError
    from hiraishin.report import article, execute, facts, folders, site, stamp
    from hiraishin.report.check import check_site

    failures: list[str] = []
    out = Path(out).resolve()  # a link stays: what it points to is replaced
    made_from = ""
    if results is not None and results.results and not results.failures and not results.missing:
        made_from = stamp.inputs(
            profile,
            results,
            {
                "notebooks": run_notebooks and [str(p) for p in notebooks or []],
                "check": check,
                "parameters": parameters,
            },
        )
        noted = stamp.missing_of(out, made_from)
        if noted is not None:
            echo("nothing that the report is made from has changed")
            return ReportOutcome(True, [], out / "index.html", noted)
    stage = folders.start(out)
    try:
        books = site.make_books(results, profile, failures)
        if results is None or not results.results:
            failures.append(
                f"nothing has been measured for the profile {profile.name}: run `hiraishin run {profile.name}`"
            )
        else:
            failures += results.failures
        if results is not None and results.missing:
            failures.append(
                f"{len(results.missing)} measurements of the profile {profile.name} are missing: run it again"
            )

        executed: list[Executed] = []
        if run_notebooks:
            chosen = list(notebooks) if notebooks is not None else sorted(paths.notebooks_dir().glob("[0-9]*.ipynb"))
            given = parameters if parameters is not None else {"profile": profile.name}
            executed = execute.execute_all(chosen, given, _depends_on(results, profile), echo=echo)
            failures += [f"notebook {nb.name}: {nb.what}" for nb in executed if not nb.ok]

        echo("figures")
        slots: dict[str, FigureSlot] = {}
        receipt_slots: dict[str, dict[str, FigureSlot]] = {}
        counter = [0]
        units = site.Units()
        try:
            figure_registry.registry()
        except UserError as error:
            failures.append(str(error))
        else:
            slots = site.make_figures(_or_empty(results, profile), stage, "figures", counter=counter, units=units)
            receipt_slots = _receipt_figures(books[1:], stage, counter, units)
        failures += [f"figure {s.id}: {s.problem}" for s in slots.values() if s.bug]
        pages = {nb.name for nb in executed}
        for slot in [*slots.values(), *(s for group in receipt_slots.values() for s in group.values())]:
            slot.notebook_href = f"notebooks/{slot.notebook}.html" if slot.notebook in pages else ""

        echo("pages")
        writer = article.Writer(stage, provenance.commit())
        published = facts.load_published()
        rows = ledger.rows(site.by_machine(books), published)
        writer.article(
            books,
            slots,
            receipt_slots,
            ledger.view(rows, slots, published),
            executed,
            failures,
            published,
            facts.load_constants(),
        )
        writer.receipts(books)
        _notebook_pages(writer, executed, slots, stage, failures)
        downloads = [*site.write_downloads(stage, books, rows, profile.name), *filter(None, [units.write(stage)])]
        writer.data(downloads, slots)
        missing = facts.dedupe(books[0].missing)
        writer.provenance(books, missing)

        if check:
            failures += [f"linter: {problem}" for problem in check_site(stage, finished=False)]
        folders.finish(
            stage,
            out,
            {
                "ok": not failures,
                "failures": failures,
                "missing": missing,
                "profile": profile.name,
                "commit": provenance.commit(),
                "inputs": made_from,
                "files": stamp.listing(stage),
                "notebooks": [{"name": nb.name, "ok": nb.ok, "what": nb.what} for nb in executed],
                "figures": sorted(s.id for s in slots.values() if s.ok),
            },
        )
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return ReportOutcome(not failures, failures, out / "index.html", missing)


def _or_empty(results: ResultSet | None, profile: Profile) -> ResultSet:
    from hiraishin.results import ResultSet

    return results if results is not None else ResultSet(profile, {}, [], name=profile.name)


LARGE_MODEL = 1_000_000_000
"""Bytes of weights from which a GPU's pass is more than launch overhead."""

RECEIPT_FIGURES = ("replay-map", "price")
"""What a receipt's chapter shows; a figure for each kind of evidence, or the site would grow with every receipt."""


def _receipt_figures(
    books: Sequence[Book], stage: Path, counter: list[int], units: Units
) -> dict[str, dict[str, FigureSlot]]:
    """For each GPU each figure once, from the receipt that tells most: the most arms for prices, else the most results."""
    from hiraishin.report import site
    from hiraishin.report.facts import machine_label

    made: dict[str, dict[str, FigureSlot]] = {}
    taken: set[tuple[str, str]] = set()
    carrying = [b for b in books if b.results is not None and site.is_gpu(b.machine)]
    for id in RECEIPT_FIGURES:
        for book in sorted(carrying, key=lambda b: _telling(b, id), reverse=True):
            gpu = machine_label(book.machine, book.name)
            if (gpu, id) in taken or book.results is None:
                continue
            slots = site.make_figures(
                book.results,
                stage,
                f"figures/{book.name}",
                prefix=f"{book.name}-",
                counter=counter,
                only=[id],
                units=units,
            )
            made.setdefault(book.name, {}).update(slots)
            taken |= {(gpu, id) for slot in slots.values() if slot.ok}
    return made


def _telling(book: Book, figure: str) -> tuple[Any, ...]:
    """How much a receipt has to say for a figure; the newest of equals."""
    from hiraishin.report.prices import POST_QUANT, priced

    if figure == "price":
        first = next(iter(priced(book)), None)
        weight = int(first.result.inputs.get("weight_bytes") or 0) if first else 0
        large = weight > LARGE_MODEL  # a small model's pass is all launch overhead
        return (
            large,
            len(first.builds) if first else 0,
            first is not None and first.quant == POST_QUANT,
            weight,
            book.name,
        )
    return len(book.results.results) if book.results else 0, book.name


def _notebook_pages(
    writer: Any, executed: Sequence[Executed], slots: dict[str, FigureSlot], stage: Path, failures: list[str]
) -> None:
    from markupsafe import Markup

    folder = stage / "notebooks"
    folder.mkdir(exist_ok=True)
    drawn = {
        hashlib.sha256(path.read_bytes()).hexdigest(): path.relative_to(stage).as_posix()
        for path in sorted((stage / "figures").glob("*.svg"))
    }
    for index, nb in enumerate(executed):
        from hiraishin.report import pages  # brings nbconvert, which takes seconds: only when there is a notebook

        page = pages.NotebookPage(nb.title, [], {})
        download = False
        if nb.path is not None and nb.path.exists():
            try:
                page = pages.read_notebook(nb.path, nb.title, nb.name)
                if nb.path.stat().st_size <= LARGEST_NOTEBOOK:
                    text = pages.without_places(nb.path.read_text(encoding="utf-8"))
                    (folder / f"{nb.name}.ipynb").write_text(text, encoding="utf-8")
                    download = True
            except Exception as error:  # a page that cannot be made must not take the site with it
                failures.append(f"notebook {nb.name}: its page cannot be made: {type(error).__name__}: {error}")
        for name, blob in page.files.items():
            same = drawn.get(hashlib.sha256(blob).hexdigest())
            if same is not None:  # the article's own figure: shown from there, not stored twice
                for cell in page.cells:
                    cell.outputs = [Markup(str(o).replace(f"files/{name}", f"../{same}")) for o in cell.outputs]
                continue
            (folder / "files").mkdir(exist_ok=True)
            (folder / "files" / name).write_bytes(blob)
        writer.page(
            "notebook.html.j2",
            f"notebooks/{nb.name}.html",
            page=page,
            nb=nb,
            download=download,
            before=executed[index - 1] if index else None,
            after=executed[index + 1] if index + 1 < len(executed) else None,
        )
    of = {nb.name: [s for s in slots.values() if s.ok and s.notebook == nb.name] for nb in executed}
    writer.page("notebooks.html.j2", "notebooks/index.html", notebooks=executed, figures_of=of)


def _depends_on(results: ResultSet | None, profile: Profile) -> str:
    """Everything but itself that an executed notebook depends on: the package's code, the results, the profile."""
    digest = hashlib.sha256(profile.model_dump_json().encode())
    for path in sorted(Path(__file__).resolve().parent.parent.rglob("*.py")):
        if "report" not in path.parts[-2:]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for key in sorted(r.key for r in results.results) if results is not None else []:
        digest.update(key.encode())
    return digest.hexdigest()
