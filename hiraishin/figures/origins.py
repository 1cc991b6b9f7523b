"""Which operation differs first: the operations of a pass in graph order, by width; origins apart from what they spoil."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "origins"
TITLE = "Which operation differs first"
NOTEBOOK = "04_localize"


def data(results: ResultSet, *, quant: str | None = None) -> Frame:
    """One row per build, width and operation: its place in the graph, name, weight type, switch and verdict."""
    frame: Frame = results.tables("localize")
    if frame.empty:
        return frame
    frame = select.one_setting(frame[frame["build"].isin(select.ARMS)], results, quant=quant)
    columns = [
        *select.SETTINGS,
        "build",
        "prompt",
        "width",
        "index",
        "layer",
        "tensor",
        "op",
        "weight_type",
        "switch",
        "differing",
        "tokens",
        "verdict",
        "max_abs_diff",
    ]
    order = [c for c in ("build", "width", "index") if c in frame.columns]
    return frame[[c for c in columns if c in frame.columns]].sort_values(
        order, ascending=[False, True, True][: len(order)], ignore_index=True
    )


def _origins(data: Frame) -> Frame:
    return data[data["verdict"] == "origin"]


def _first(data: Frame, build: str) -> list[tuple[int, Any]]:
    out: list[tuple[int, Any]] = []
    for width, rows in data[data["build"] == build].groupby("width", sort=True):
        found = _origins(rows).sort_values("index")
        out.append((int(width), found.iloc[0] if len(found) else None))
    return out


def _named_op(row: Any) -> str:
    weight = row.get("weight_type")
    kind = f" of {weight}" if isinstance(weight, str) and weight and row["op"].startswith("MUL_MAT") else ""
    return f"{row['op']}{kind} ({row['tensor']})"


def _title(data: Frame) -> str:
    build = select.in_order(data["build"])[0]
    firsts = [(w, r) for w, r in _first(data, build) if r is not None]
    if not firsts:
        return f"On {select.named(build)} no operation differs at any width watched"
    width, row = firsts[0]
    return f"At width {width} the first operation that differs on {select.named(build)} is {_named_op(row)}"


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """A strip per width in graph order: pale where equal, coloured where not, a tall mark at each origin."""
    style.require(data, ID, "watched operations", ("build", "verdict", "op", "tensor"), ("width", "index"))
    builds = select.in_order(data["build"])
    widths = sorted(int(w) for w in data["width"].unique())
    last = int(data["index"].max()) + 1
    firsts = {b: _first(data, b) for b in builds}
    figure = style.new(1.75 + len(builds) * (0.5 + 0.46 * len(widths)), _title(data))
    panels = figure.subplots(len(builds), 1, sharex=True, squeeze=False)[:, 0]
    small = style.SMALL
    for ax, build in zip(panels, builds, strict=True):
        for k, width in enumerate(widths):
            rows = data[(data["build"] == build) & (data["width"] == width)]
            y = -float(k)
            if rows.empty:
                ax.text(last / 2, y, "not measured", ha="center", va="center", fontsize=small, color=theme.muted)
                continue
            ax.broken_barh([(0, int(rows["index"].max()) + 1)], (y - 0.13, 0.26), facecolor=theme.faint)
            spoiled = sorted(int(i) for i in rows[rows["verdict"] != "equal"]["index"])
            ax.broken_barh(_runs(spoiled), (y - 0.13, 0.26), facecolor=theme.series(build), alpha=0.75)
            at = [int(i) + 0.5 for i in _origins(rows)["index"]]
            ax.vlines(at, y - 0.3, y + 0.26, color=theme.warn, linewidth=1.3)
            row = dict(firsts[build]).get(width)
            text = (
                "every operation equal" if row is None else f"{style.count(len(at), 'origin')}, first {_named_op(row)}"
            )
            ax.text(0, y + 0.34, text, va="bottom", fontsize=small)
        ax.set(xlim=(-last * 0.005, last), ylim=(-len(widths) + 0.55, 0.85))
        ax.set_yticks([-k for k in range(len(widths))], [str(w) for w in widths])
        ax.set_ylabel("pass width")
        ax.set_title(select.named(build))
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        for t in ax.texts:
            t.set_in_layout(False)
    panels[-1].set_xlabel("operations in graph order")
    figure.legend(
        handles=[
            Patch(facecolor=theme.faint, label="equal"),
            Patch(facecolor=theme.series(builds[0]), alpha=0.75, label="differs"),
            Patch(facecolor=theme.warn, label="origin: inputs equal, output not"),
        ],
        loc="outside lower left",
        ncols=3,
        columnspacing=1.2,
    )
    return figure


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Neighbouring indices joined to (start, length)."""
    out: list[tuple[int, int]] = []
    for i in indices:
        if out and out[-1][0] + out[-1][1] == i:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((i, 1))
    return out


def alt(data: Frame) -> str:
    """The finding in words."""
    words = []
    for build in select.in_order(data["build"]):
        for width, row in _first(data, build):
            if row is None:
                words.append(f"On {select.named(build)} at width {width} every operation is equal.")
            else:
                mine = data[(data["build"] == build) & (data["width"] == width)]
                words.append(
                    f"On {select.named(build)} at width {width}: {style.count(len(_origins(mine)), 'origin')}, the first "
                    f"{_named_op(row)}; {int((mine['verdict'] != 'equal').sum())} of {len(mine)} operations differ."
                )
    return "Strips of the operations of a pass in graph order. " + " ".join(words)


def caption(data: Frame) -> str:
    """The line under the picture."""
    switches = sorted({str(s) for s in _origins(data)["switch"].dropna() if str(s)}) if "switch" in data.columns else []
    tail = f" Switches behind the origins: {'; '.join(switches)}." if switches else ""
    return (
        f"{select.setting(data)}; operations compared bit for bit with the same tokens decoded alone. An origin has equal "
        f"inputs and another output.{tail}"
    )
