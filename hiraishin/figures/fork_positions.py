"""Where speculative output leaves plain output: one mark per run that forks."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "fork-positions"
TITLE = "Where speculative output forks"
NOTEBOOK = "07_evaluation"
MOST = 16  # lines that are drawn; more prompts are gathered by category


def data(results: ResultSet, *, quant: str | None = None) -> Frame:
    """One row per speculative run that was prefilled as plain decoding is.

    Columns: build, matrix, prompt, draft length, identical, first differing token, margin, tokens.
    """
    frame: Frame = select.runs(results)
    if frame.empty:
        return frame
    frame = select.one_setting(frame, results, quant=quant)
    frame = frame[frame["build"].isin(select.ARMS)]
    if "prefill" in frame.columns:
        # A prompt prefilled in two pieces leaves another cache: what parts there is no fork of the verify pass.
        frame = frame[frame["prefill"] != "last-alone"]
    if "identical" in frame.columns:
        known = frame["identical"].notna()
        frame = frame.assign(identical=frame["identical"].where(known).astype("boolean"))
    columns = [
        *select.SETTINGS,
        *select.RUN_KEYS,
        "build",
        "prompt",
        "category",
        "identical",
        "first_differing_token",
        "margin_there",
        "tokens",
    ]
    frame = frame[[c for c in columns if c in frame.columns]]
    return frame.sort_values(
        [c for c in ("matrix", "prompt", "draft_length", "build") if c in frame.columns], ignore_index=True
    )


def _counts(data: Frame) -> list[tuple[str, int, int]]:
    return [
        (b, int((~data[data["build"] == b]["identical"].astype(bool)).sum()), int((data["build"] == b).sum()))
        for b in select.in_order(data["build"])
    ]


def _lines(data: Frame) -> str:
    """What gets a line: each prompt, or, of many, each category."""
    return "category" if data["prompt"].nunique() > MOST and "category" in data.columns else "prompt"


def _title(data: Frame) -> str:
    return "; ".join(f"{select.named(b)}: {forks} of {runs} runs fork" for b, forks, runs in _counts(data)).capitalize()


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """A line per prompt (or category) as long as its run; crosses where a run's token first differs from plain decoding."""
    style.require(data, ID, "speculative runs", ("build", "prompt", "first_differing_token"), ("identical", "tokens"))
    forked = data[~data["identical"].astype(bool)]
    style.require(
        forked if len(forked) else data, ID, "forked runs", (), ("first_differing_token",) if len(forked) else ()
    )
    by = _lines(data)
    shown = sorted(str(x) for x in data[by].unique())[:MOST]
    builds = select.in_order(data["build"])
    figure = style.new(1.75 + 0.235 * len(shown), _title(data))
    axes = figure.subplots()
    place = {p: -k for k, p in enumerate(shown)}
    for p in shown:
        axes.hlines(place[p], 0, int(data[data[by] == p]["tokens"].max()), color=theme.faint, linewidth=5)
    for build, marker in zip(builds, ("x", "o", "^"), strict=False):
        rows = forked[(forked["build"] == build) & forked[by].isin(shown)]
        if len(rows):
            axes.plot(
                rows["first_differing_token"],
                rows[by].map(place),
                marker,
                color=theme.series(build),
                markersize=7,
                markeredgewidth=2,
                linestyle="none",
                markerfacecolor="none",
            )
    for build, marker in zip(builds, ("x", "o", "^"), strict=False):
        forks, runs = next((f, n) for b, f, n in _counts(data) if b == build)
        axes.plot(
            [],
            [],
            marker=marker if forks else "None",
            color=theme.series(build),
            markeredgewidth=2,
            markerfacecolor="none",
            linestyle="none",
            label=f"{select.named(build)}: {forks} of {runs} runs fork",
        )
    axes.set_yticks(
        [place[p] for p in shown], [p if len(p) <= 22 else p[:21] + "…" for p in shown], fontsize=style.SMALL
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(
        xlim=(0, float(data["tokens"].max()) * 1.02),
        ylim=(-len(shown) + 0.4, 0.6),
        xlabel="first token that differs from plain decoding",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    words = []
    for build, forks, runs in _counts(data):
        rows = data[(data["build"] == build) & ~data["identical"].astype(bool)]
        where = f", the earliest at token {int(rows['first_differing_token'].min())}" if len(rows) else ""
        words.append(f"On {select.named(build)} {forks} of {runs} runs leave plain decoding's output{where}.")
    return "Marks where speculative output first differs from plain output, a line a prompt or category. " + " ".join(
        words
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    forked = data[~data["identical"].astype(bool)]
    margins = forked["margin_there"].dropna() if "margin_there" in data.columns else pd.Series(dtype=float)
    tail = f" Plain decoding's margin at the forks: {margins.min():.2g} to {margins.max():.2g}." if len(margins) else ""
    lengths = sorted({int(x) for x in data["draft_length"].dropna()}) if "draft_length" in data.columns else []
    many = f", draft lengths {style.span(lengths)}" if lengths else ""
    hidden = " A line is a kind of prompt." if _lines(data) == "category" else ""
    if data[_lines(data)].nunique() > MOST:
        hidden += f" The first {MOST} are drawn."
    return f"{select.setting(data)}; {style.count(data['prompt'].nunique(), 'prompt')}{many}.{hidden}{tail}"
