"""How wide verify passes really are: the price at 9 tokens matters less when most passes are narrow."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "verify-widths"
TITLE = "How wide verify passes are"
NOTEBOOK = "08_cycle"


def data(results: ResultSet, *, matrix: str | None = None) -> Frame:
    """One row per build and width: cycles, tokens accepted in them, mean verify milliseconds."""
    runs: Frame = select.runs(results)
    if runs.empty:
        return runs
    runs = select.one_matrix(select.one_setting(runs, results), matrix)
    keep = set(runs["key"])
    frames = [
        r.table.assign(build=r.inputs["build"])
        for r in results.of("speculative")
        if r.key in keep and r.table is not None and len(r.table)
    ]
    if not frames:
        return pd.DataFrame()
    cycles: Frame = pd.concat(frames, ignore_index=True)
    out = cycles.groupby(["build", "width"], as_index=False).agg(
        cycles=("width", "size"),
        accepted=("accepted", lambda x: x.sum(skipna=False)),
        verify_ms=("verify_ms", lambda x: x.mean(skipna=False)),
    )
    for c in (*select.SETTINGS, "matrix", "draft_length"):
        if c in runs.columns:
            out[c] = runs[c].iloc[0]
    return out


def _mean(rows: Frame) -> float:
    return float((rows["width"] * rows["cycles"]).sum() / rows["cycles"].sum())


def _main(data: Frame) -> Frame:
    return data[data["build"] == ("patched" if (data["build"] == "patched").any() else data["build"].iloc[0])]


def _title(data: Frame) -> str:
    rows = _main(data)
    return f"The average verify pass is {_mean(rows):.2f} tokens wide, the widest {int(rows['width'].max())}"


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Share of cycles per width, a bar per build; the dotted line is the mean."""
    style.require(data, ID, "speculative cycles", ("build",), ("width", "cycles", "accepted", "verify_ms"))
    figure = style.new(3.6, _title(data))
    axes = figure.subplots()
    builds = select.in_order(data["build"])
    slot = 0.84 / len(builds)
    for k, build in enumerate(builds):
        rows = data[data["build"] == build]
        share = 100 * rows["cycles"] / rows["cycles"].sum()
        axes.bar(
            rows["width"] + (k - (len(builds) - 1) / 2) * slot,
            share,
            width=slot * 0.94,
            color=theme.series(build),
            hatch="//" if build == "patched" else "",
            edgecolor=theme.paper,
            linewidth=0,
            label=f"{select.named(build)}, mean {_mean(rows):.2f}, {int(rows['cycles'].sum()):,} cycles",
        )
    axes.axvline(_mean(_main(data)), color=theme.ink, linestyle=(0, (1, 1.5)), linewidth=1.4)
    axes.set(xlabel="tokens in the verify pass", ylabel="% of cycles", xticks=range(1, int(data["width"].max()) + 1))
    axes.grid(axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=1)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    words = []
    for build in select.in_order(data["build"]):
        rows = data[data["build"] == build]
        narrow = 100 * rows[rows["width"] <= 4]["cycles"].sum() / rows["cycles"].sum()
        words.append(
            f"On {select.named(build)} the mean width is {_mean(rows):.2f} and {narrow:.0f} % of "
            f"{int(rows['cycles'].sum()):,} passes have at most 4 tokens."
        )
    return "Bars of how often a verify pass has each width. " + " ".join(words)


def caption(data: Frame) -> str:
    """The line under the picture."""
    rows = _main(data)
    ms = float((rows["verify_ms"] * rows["cycles"]).sum() / rows["cycles"].sum())
    matrix = f"; matrix {rows['matrix'].iloc[0]}" if "matrix" in data.columns else ""
    return (
        f"{select.setting(data)}{matrix}. A verify pass on {select.named(str(rows['build'].iloc[0]))} takes {ms:.3g} ms on "
        "average."
    )
