"""Figures: one module each, a pure function from results to a matplotlib figure.

A figure module has the constants ``ID`` (with dashes), ``TITLE`` and ``NOTEBOOK`` (the notebook that shows it) and the functions
``data(results) -> DataFrame``, ``draw(data, theme) -> Figure``, ``alt(data) -> str`` and ``caption(data) -> str``.
Dropping a module into this folder is all it takes to add one.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import pandas as pd
from matplotlib.figure import Figure

from hiraishin.errors import UserError
from hiraishin.figures.style import Theme
from hiraishin.results import ResultSet

HELPERS = {"style", "save", "select", "slim"}


class FigureModule(Protocol):
    """What every figure module offers."""

    ID: str
    TITLE: str
    NOTEBOOK: str

    def data(self, results: ResultSet, **parameters: Any) -> pd.DataFrame:
        """The numbers of the figure, tidy; what the CSV holds."""

    def draw(self, data: pd.DataFrame, theme: Theme) -> Figure:
        """The picture. Raises UserError when the data cannot carry it."""

    def alt(self, data: pd.DataFrame) -> str:
        """The finding in words, for those who do not see the picture."""

    def caption(self, data: pd.DataFrame) -> str:
        """The line under the picture; plain text, its numbers from the data."""


def collect(modules: Iterable[FigureModule]) -> dict[str, FigureModule]:
    """Figure modules by id.

    Raises UserError when two modules claim one id.
    """
    found: dict[str, FigureModule] = {}
    for module in modules:
        if module.ID in found:
            names = sorted([found[module.ID].__name__, module.__name__])  # type: ignore[attr-defined]
            raise UserError(f"two figures are called {module.ID!r}: {names[0]} and {names[1]}", "Rename one of them.")
        found[module.ID] = module
    return found


@functools.cache
def _registry() -> dict[str, FigureModule]:
    names = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in HELPERS)
    return collect(cast(FigureModule, importlib.import_module(f"{__name__}.{name}")) for name in names)


def registry() -> dict[str, FigureModule]:
    """Every figure by id, found from this folder.

    Raises UserError when two modules claim one id.
    """
    return dict(_registry())


def find(figure_id: str) -> FigureModule:
    """One figure.

    Raises UserError when there is none of that id.
    """
    known = registry()
    if figure_id not in known:
        raise UserError(f"there is no figure {figure_id!r}", f"Known figures: {', '.join(sorted(known))}.")
    return known[figure_id]


class Shown:
    """A drawn figure as a notebook shows it: SVG with alternative text, and the dark theme's SVG beside it."""

    def __init__(self, light: bytes, dark: bytes, alt: str) -> None:
        self.light = light.decode()
        self.dark = dark.decode()
        self.alt = alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        about = {"alt": self.alt, "dark": self.dark}
        return {"image/svg+xml": self.light, "text/plain": self.alt}, {"image/svg+xml": about}


def show(figure_id: str, results: ResultSet | None = None, **parameters: Any) -> Shown:
    """Draw a figure for a notebook; ``parameters`` go to the figure's ``data``.

    Computed figures need no results.

    Raises:
        UserError: no such figure, or the results cannot carry it.
    """
    from hiraishin.figures.save import svg
    from hiraishin.figures.style import THEMES

    module = find(figure_id)
    data = module.data(results if results is not None else ResultSet(None, {}, []), **parameters)
    light, dark = (svg(module.draw(data, theme), theme) for theme in THEMES.values())
    return Shown(light, dark, module.alt(data))
