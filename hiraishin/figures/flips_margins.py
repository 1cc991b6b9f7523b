"""A flip needs a margin smaller than the logits move: every differing position, margin against difference."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "flips-margins"
TITLE = "Flips happen where the margin is small"
NOTEBOOK = "03_replay"


def data(results: ResultSet, *, quant: str | None = None) -> Frame:
    """Rows of part ``position``: every differing position's margin and difference. Part ``arm``: rows compared and differing."""
    frame = select.replays(results, quant=quant)
    if frame.empty:
        return frame
    settings = [c for c in select.SETTINGS if c in frame.columns]
    totals = frame.groupby([*settings, "build"], as_index=False).agg(
        compared=("differing", "size"), differing=("differing", "sum"), flips=("flip", "sum")
    )
    bad = frame[frame["differing"].astype(bool) | frame["max_abs_diff"].isna()]
    rows = bad[[*settings, "build", "prompt", "width", "kv_position", "margin", "max_abs_diff", "flip"]].sort_values(
        ["build", "prompt", "width", "kv_position"], ascending=[False, True, True, True]
    )
    return pd.concat([totals.assign(part="arm"), rows.assign(part="position")], ignore_index=True)


def _split(data: Frame) -> tuple[Frame, Frame]:
    return data[data["part"] == "arm"], data[data["part"] == "position"]


def _flips(rows: Frame) -> Frame:
    return rows[rows["flip"].astype(bool)]


def _title(data: Frame) -> str:
    totals, rows = _split(data)
    flips = _flips(rows)
    if rows.empty:
        return f"No logit row differs in {int(totals['compared'].sum()):,}: nothing can flip"
    if flips.empty:
        return f"{len(rows):,} rows differ and none flips: every margin was larger"
    return (
        f"{style.count(len(flips), 'flip')} among {len(rows):,} differing rows, at margins of {flips['margin'].min():.2g} to "
        f"{flips['margin'].max():.2g}"
    )


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Both axes logarithmic. Right of the dashed line the margin is more than twice the difference, so no flip is possible."""
    style.require(data, ID, "replays", ("part", "flip"))
    totals, rows = _split(data)
    style.require(totals, ID, "replays", (), ("compared", "differing"))
    if len(rows):
        style.require(rows, ID, "differing positions", (), ("margin", "max_abs_diff"))
    figure = style.new(4.5, _title(data))
    axes = figure.subplots()
    if rows.empty:
        lines = [f"{r.build}: 0 of {int(r.compared):,} logit rows differ" for r in totals.itertuples()]
        axes.text(0.5, 0.5, "\n".join(lines), ha="center", va="center", transform=axes.transAxes)
        style.plain(axes)
        return figure
    floor = max(float(rows.loc[rows["margin"] > 0, "margin"].min()) / 2, 1e-6) if (rows["margin"] > 0).any() else 1e-6
    margin = rows["margin"].clip(lower=floor)  # an exact tie has no place on a log axis: it goes to the left edge
    low = float(rows["max_abs_diff"].min()) / 1.6
    high = float(rows["max_abs_diff"].max()) * 1.6
    right = float(margin.max()) * 1.6
    y = np.geomspace(low, high, 50)
    axes.fill_betweenx(y, np.minimum(2 * y, right), right, color=theme.faint, alpha=0.7, linewidth=0)
    axes.plot(2 * y, y, "--", color=theme.muted, linewidth=1.4)
    flips = rows["flip"].astype(bool)
    for arm, marker in (("stock", "."), ("patched", "+")):
        part = (rows["build"] == arm) & ~flips
        if part.any():
            axes.plot(
                margin[part],
                rows.loc[part, "max_abs_diff"],
                marker,
                color=theme.series(arm),
                markersize=3.5,
                linestyle="none",
                alpha=0.55,
                label=f"{arm}, argmax kept ({int(part.sum()):,})",
                rasterized=True,
            )
        part = (rows["build"] == arm) & flips
        if part.any():
            axes.plot(
                margin[part],
                rows.loc[part, "max_abs_diff"],
                "X" if arm == "stock" else "P",
                color=theme.warn,
                markeredgecolor=theme.paper,
                markersize=8.5,
                linestyle="none",
                label=f"{arm}, argmax flipped ({int(part.sum()):,})",
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(floor / 1.3, right),
        ylim=(low, high),
        xlabel="margin: top-1 minus top-2 logit of the one-token pass",
        ylabel="largest logit difference",
    )
    for r in totals.itertuples():
        if not r.differing:
            axes.plot([], [], " ", label=f"{r.build}: 0 of {int(r.compared):,} rows differ")
    axes.plot([], [], "--", color=theme.muted, linewidth=1.4, label="margin = 2 × difference; grey: no flip possible")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower left", ncols=1, markerscale=1.4, handlelength=1.6
    )
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    totals, rows = _split(data)
    compared = style.span(
        [f"{int(r.differing):,} of {int(r.compared):,} rows differ on {r.build}" for r in totals.itertuples()]
    )
    flips = _flips(rows)
    if flips.empty:
        return f"Margin against logit difference for every differing position: {compared}; the argmax never flips."
    beyond = int((flips["margin"] > 2 * flips["max_abs_diff"]).sum())
    rule = (
        "none of them has a margin above twice the difference"
        if not beyond
        else f"{beyond} of them have a margin above twice the difference"
    )
    return (
        f"Margin against logit difference for every differing position: {compared}. "
        f"{style.count(len(flips), 'argmax flip')}, at margins of "
        f"{flips['margin'].min():.2g} to {flips['margin'].max():.2g}; {rule}."
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    totals, rows = _split(data)
    smaller = int((_flips(rows)["margin"] < _flips(rows)["max_abs_diff"]).sum())
    flips = len(_flips(rows))
    tail = f" {smaller} of {flips} flips have a margin below the difference itself." if flips else ""
    return (
        f"{select.setting(totals)}. A logit can rise and another fall by the difference at most, so a flip needs a margin of "
        f"at most twice it.{tail}"
    )
