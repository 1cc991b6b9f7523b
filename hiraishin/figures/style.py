"""One look for all figures: two themes, colour-blind safe colours that differ in grey too, sizes that survive a phone.

A figure never relies on colour alone: every series also has a marker, a hatch or a line style. Text is kept as text in the SVG;
the layout is computed with DejaVu Sans (it comes with matplotlib), which is wider than the fonts a browser falls back to.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hiraishin.errors import UserError

WIDTH = 6.0  # inches; 576 CSS pixels, so a phone shows it at about 0.63 of its size
TEXT = 10.5  # points
SMALL = 9.0  # points, the smallest text anywhere
TITLE = 12.0  # points
Frame = Any
"""A pandas DataFrame. Its stubs give every cell a union of thirty types; a figure knows its own columns."""


@dataclass(frozen=True)
class Theme:
    """Colours of one theme. ``stock`` and ``exact`` always mean those builds; ``third`` and ``fourth`` are further series."""

    name: str
    paper: str
    ink: str
    muted: str
    faint: str
    stock: str
    exact: str
    third: str
    fourth: str
    warn: str
    sequential: str  # a perceptually uniform colour map; runs from paper to ink in grey

    def series(self, name: str) -> str:
        """The colour of a build or series by name; builds called otherwise take the later colours."""
        known = {
            "stock": self.stock,
            "patched": self.exact,
            "exact": self.exact,
            "third": self.third,
            "fourth": self.fourth,
        }
        return known.get(name, self.third)

    def rc(self) -> Any:
        """The matplotlib settings of this theme; fixed, so that a figure is the same bytes on every machine and every run."""
        return {
            "font.family": ["sans-serif"],
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica", "sans-serif"],
            "font.monospace": ["DejaVu Sans Mono", "Menlo", "Consolas", "monospace"],
            "font.size": TEXT,
            "axes.titlesize": TEXT,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": TEXT,
            "xtick.labelsize": SMALL + 0.5,
            "ytick.labelsize": SMALL + 0.5,
            "legend.fontsize": SMALL + 0.5,
            "figure.titlesize": TITLE,
            "figure.titleweight": "bold",
            "figure.facecolor": self.paper,
            "figure.edgecolor": self.paper,
            "savefig.facecolor": self.paper,
            "savefig.edgecolor": self.paper,
            "axes.facecolor": self.paper,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "text.color": self.ink,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": False,
            "grid.color": self.faint,
            "grid.linewidth": 0.8,
            "hatch.color": self.paper,
            "hatch.linewidth": 1.2,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "lines.markersize": 6.0,
            "svg.fonttype": "none",
            "svg.hashsalt": "hiraishin",
            "path.simplify": False,
            "figure.dpi": 100,
            "savefig.dpi": 200,
            "axes.unicode_minus": True,
        }


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#1b1f24",
    muted="#57606a",
    faint="#dfe3e8",
    stock="#c4500a",
    exact="#1a6fb5",
    third="#2f8f6b",
    fourth="#9a5fb0",
    warn="#8a1538",
    sequential="YlOrRd",
)
DARK = Theme(
    name="dark",
    paper="#14181d",
    ink="#e9edf1",
    muted="#a4afba",
    faint="#333b44",
    stock="#ff9d5c",
    exact="#63b3f5",
    third="#63cfa3",
    fourth="#d3a3e6",
    warn="#ff8fa8",
    sequential="inferno",
)
THEMES = {"light": LIGHT, "dark": DARK}

Draw = Callable[[Frame, Theme], Figure]


def styled(draw: Draw) -> Draw:
    """Run a figure's ``draw`` under the theme's settings, whatever the caller's matplotlib is set to."""

    @functools.wraps(draw)
    def inner(data: Frame, theme: Theme = LIGHT) -> Figure:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(theme.rc())
            return draw(data, theme)

    return inner


def new(height: float, title: str, width: float = WIDTH) -> Figure:
    """An empty figure with a left-aligned title that states the finding, wrapped to the width."""
    figure = Figure(figsize=(width, height), layout="constrained")
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.06, h_pad=0.06)  # type: ignore[call-arg]
    figure.suptitle(wrap(title, int(width * 9.6)), x=0.012, ha="left")
    return figure


def wrap(text: str, columns: int) -> str:
    """Break ``text`` at spaces so that no line is longer than ``columns``."""
    return "\n".join(textwrap.wrap(text, columns, break_long_words=False))


def plain(axes: Axes) -> None:
    """Take away the frame and ticks of an axes that holds a drawing, not a plot."""
    axes.set_axis_off()


def require(data: Frame, figure: str, what: str, columns: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Refuse to draw from nothing.

    Raises UserError naming the figure and what is missing: no rows, an absent column, or a NaN among ``numbers``.
    """
    if data.empty:
        raise UserError(
            f"figure {figure}: no {what} in the results", "Run `hiraishin run` for a profile that measures it."
        )
    for column in (*columns, *numbers):
        if column not in data.columns:
            raise UserError(
                f"figure {figure}: the results hold no {column!r} for {what}", "Measure again with this version."
            )
    for column in numbers:
        bad = int(data[column].isna().sum())
        if bad:
            raise UserError(
                f"figure {figure}: {bad} of {len(data)} rows have no number in {column!r} ({what})", "Measure again."
            )


def count(n: int, one: str, many: str = "") -> str:
    """``1 flip``, ``3 flips``, ``no flip``."""
    if n == 0:
        return f"no {one}"
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def span(values: list[int] | list[str]) -> str:
    """A short list in words: ``2``, ``2 and 3``, ``2, 3 and 5``."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"
