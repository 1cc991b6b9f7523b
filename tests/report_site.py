"""Rendered sites for the report's tests, made once a session from made-up runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_synthetic as made_up

from hiraishin.report import ReportOutcome, build_report

FEW = ("float-order", "replay-map", "flips-margins")
"""The figures that most tests make do with; drawing all of them takes a while."""

PARAMETERS = 'profile: str = "default"  # which'


def write_notebook(
    path: Path, *sources: str, parameters: str | None = PARAMETERS, title: str = "A question", kernel: str = "python3"
) -> Path:
    """A notebook with a title, a parameters cell and one code cell for each source."""

    def code(source: str, *tags: str) -> dict[str, Any]:
        return {
            "cell_type": "code",
            "source": source,
            "metadata": {"tags": list(tags)},
            "outputs": [],
            "execution_count": None,
        }

    text = f"# {title}\n\nSome *words*, and `code`."
    cells: list[dict[str, Any]] = [{"cell_type": "markdown", "source": text, "metadata": {}}]
    if parameters is not None:
        cells.append(code(parameters, "parameters"))
    cells += [code(source) for source in sources]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    about = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    notebook = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def few_figures(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = FEW) -> None:
    """Let the registry know only some figures."""
    from hiraishin import figures

    everything = figures._registry()  # whatever an earlier call of this function left in force
    monkeypatch.setattr(figures, "registry", lambda: {name: everything[name] for name in names if name in everything})


def build(out: Path, results: Any, **arguments: Any) -> ReportOutcome:
    """A report without progress lines."""
    arguments.setdefault("run_notebooks", False)
    arguments.setdefault("echo", lambda line: None)
    return build_report(made_up.profile(), results, out, **arguments)


HOSTILE_NOTEBOOK = (
    "from IPython.display import HTML, SVG, display\n"
    "import pandas as pd\n"
    "print('plain <script>alert(1)</script> </pre> \\x00 \\u202eright to left')\n"
    "print('x' * 1_000_000)\n",
    "display(HTML('<script>document.title = \"owned\"</script><img src=x onerror=alert(1)><b>bold</b>'))\n"
    'box = \'<rect width="20" height="20"/></svg>\'\n'
    'head = \'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">\'\n'
    "display(SVG(head + '<script>alert(1)</script>' + box))\n"
    "pd.DataFrame({'text': ['<script>alert(1)</script>', 'fine'], 'n': [1, 2]})\n",
)
"""Cells whose outputs try everything that a model's text could try."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportOutcome]:
    """A whole site: some figures, one GPU receipt, one good notebook with hostile outputs, one failing notebook."""
    root = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HIRAISHIN_HOME", str(root / "home"))
        few_figures(monkeypatch)
        made_up.one_receipt(root / "receipts", monkeypatch)
        notebooks = [
            write_notebook(root / "01_hostile.ipynb", *HOSTILE_NOTEBOOK, title="Hostile outputs"),
            write_notebook(root / "02_failing.ipynb", "print('before')", "1 / 0", title="A failing cell"),
        ]
        outcome = build(root / "html", made_up.run(), run_notebooks=True, notebooks=notebooks)
    yield outcome  # outside: nothing may stay patched for the tests of other modules that run meanwhile
