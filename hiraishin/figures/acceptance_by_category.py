"""How often guesses are right, by kind of prompt, and what that does to speed."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.cycle import PARTS, _plain_ms
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "acceptance-by-category"
TITLE = "Guesses that were right, by kind of prompt"
NOTEBOOK = "07_evaluation"


def data(results: ResultSet, *, matrix: str | None = None, build: str = "patched") -> Frame:
    """One row per category: prompts, drafted, accepted, acceptance, tokens a cycle, and speed over plain if known."""
    frame: Frame = select.runs(results)
    if frame.empty or "category" not in frame.columns:
        return pd.DataFrame()
    frame = select.one_matrix(select.one_setting(frame, results), matrix)
    frame = frame[frame["build"] == (build if (frame["build"] == build).any() else select.in_order(frame["build"])[0])]
    plain: Frame = select.runs(results, "plain")
    rows = []
    for category, mine in frame.groupby("category", sort=True):
        drafted, accepted = mine["drafted"].sum(skipna=False), mine["accepted"].sum(skipna=False)
        seconds = sum(mine[f"seconds_{p}"].sum() for p in PARTS if f"seconds_{p}" in mine.columns)
        each = _plain_ms(plain, mine, str(mine["build"].iloc[0]))
        row: dict[str, object] = {c: mine[c].iloc[0] for c in (*select.SETTINGS, *select.RUN_KEYS) if c in mine.columns}
        row |= {
            "build": mine["build"].iloc[0],
            "category": category,
            "prompts": mine["prompt"].nunique(),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": accepted / drafted if drafted else 0.0,
            "tokens_per_cycle": (mine["tokens"] - 1).sum() / mine["cycles"].sum(),
            "speed": (mine["tokens"] - 1).sum() * each / 1e3 / seconds if seconds else None,
        }
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["acceptance", "category"], ascending=[False, True], ignore_index=True)


def _title(data: Frame) -> str:
    total = 100 * data["accepted"].sum() / data["drafted"].sum() if data["drafted"].sum() else 0.0
    best, worst = data.iloc[0], data.iloc[-1]
    if len(data) == 1:
        return f"{total:.0f} % of drafted tokens are accepted"
    return (
        f"{total:.0f} % of drafted tokens are accepted: {100 * best['acceptance']:.0f} % in {best['category']}, "
        f"{100 * worst['acceptance']:.0f} % in {worst['category']}"
    )


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """A bar per category; the numbers beside it are tokens a cycle and speed over plain decoding."""
    style.require(
        data, ID, "speculative runs with categories", ("category", "build"), ("acceptance", "tokens_per_cycle")
    )
    figure = style.new(1.45 + 0.36 * len(data), _title(data))
    axes = figure.subplots()
    y = list(range(len(data)))[::-1]
    axes.barh(y, 100 * data["acceptance"], height=0.68, color=theme.series(str(data["build"].iloc[0])))
    for at, r in zip(y, data.itertuples(), strict=True):
        speed = f", {r.speed:.2f}×" if r.speed is not None and pd.notna(r.speed) else ""
        axes.text(101.5, at, f"{r.tokens_per_cycle:.2f}{speed}", va="center", fontsize=style.SMALL + 0.5)
    axes.set_yticks(y, [f"{r.category} ({r.prompts})" for r in data.itertuples()])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 100)
    axes.set(
        xlim=(0, 132),
        xticks=range(0, 101, 25),
        xlabel="% of drafted tokens accepted; right: tokens a cycle, speed over plain",
    )
    axes.xaxis.label.set_fontsize(style.SMALL + 0.5)
    axes.xaxis.label.set_horizontalalignment("right")
    axes.xaxis.label.set_x(1.0)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    return "Bars of accepted drafted tokens by category. " + " ".join(
        f"{r.category}: {100 * r.acceptance:.0f} %, {r.tokens_per_cycle:.2f} tokens a cycle"
        + (f", {r.speed:.2f} times plain speed." if r.speed is not None and pd.notna(r.speed) else ".")
        for r in data.itertuples()
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    matrix = f"; matrix {data['matrix'].iloc[0]}" if "matrix" in data.columns else ""
    return (
        f"{select.setting(data)}{matrix}; {select.named(str(data['build'].iloc[0]))} build, {int(data['drafted'].sum()):,} "
        "drafted tokens. In brackets: prompts."
    )
