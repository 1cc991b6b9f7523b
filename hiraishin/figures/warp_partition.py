"""Which blocks of a Q6_K row each warp sums, at the warp counts of two widths, and the bits that result."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hiraishin.figures import style
from hiraishin.figures.style import Frame, Theme
from hiraishin.numerics import bits, mul_mat_vec_q6_k, nwarps_for, real_row
from hiraishin.results import ResultSet

ID = "warp-partition"
TITLE = "Which warp sums which block"
NOTEBOOK = "02_float_order"


def data(
    results: ResultSet | None = None, *, row: int = 0, columns: tuple[int, ...] = (1, 5), fused: bool = True
) -> Frame:
    """One row per width and block: the warp that sums it and when; with the width's result and its bits. Needs no results."""
    real = real_row(row)
    rows = []
    for n in columns:
        out = mul_mat_vec_q6_k(real.packed, real.quants, real.scales8, nwarps_for(n), fused=fused)
        for warp, blocks in enumerate(out.blocks_of):
            for turn, block in enumerate(blocks):
                rows.append(
                    {
                        "columns": n,
                        "warps": out.nwarps,
                        "block": block,
                        "warp": warp,
                        "turn": turn,
                        "warp_sum": float(np.sum(out.partials[warp], dtype=np.float64)),
                        "value": float(out.value),
                        "bits": bits(out.value),
                        "fused": fused,
                        "source": real.source,
                    }
                )
    return pd.DataFrame(rows).sort_values(["columns", "block"], ignore_index=True)


def _results(data: Frame) -> Frame:
    return data.drop_duplicates("columns")[["columns", "warps", "value", "bits"]]


def _title(data: Frame) -> str:
    found = _results(data)
    if found["warps"].nunique() == 1:
        return (
            f"{style.span(list(found['columns']))} columns: the same {int(found['warps'].iloc[0])} warps, the same order, the "
            "same bits"
        )
    first, last = found.iloc[0], found.iloc[-1]
    blocks = data[(data["columns"] == first["columns"]) & (data["warp"] == 0)]["block"]
    tail = "the bits differ" if first["bits"] != last["bits"] else "here the bits agree by luck"
    return (
        f"Warp 0 sums blocks {style.span(list(blocks))} with {first['warps']} warps and every {_nth(int(last['warps']))} "
        f"block with {last['warps']}: {tail}"
    )


def _nth(n: int) -> str:
    return {1: "single", 2: "second", 3: "third", 4: "fourth"}.get(n, f"{n}th")


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """A row of squares a warp, a column a block; the hand-over to warp 0 and the fold stand beside it."""
    style.require(data, ID, "warps", ("bits", "columns"), ("block", "warp", "warps"))
    groups = [(int(n), rows) for n, rows in data.groupby("columns", sort=True)]
    heights = [int(rows["warps"].iloc[0]) + 2.75 for _, rows in groups]
    figure = style.new(0.75 + 0.335 * sum(heights), _title(data))
    axes = figure.subplots(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    fills = [(theme.exact, ""), (theme.stock, "//"), (theme.third, ".."), (theme.fourth, "xx")]
    small = style.SMALL + 0.5
    blocks = int(data["block"].max()) + 1
    for ax, (n, rows) in zip(axes, groups, strict=True):
        warps = int(rows["warps"].iloc[0])
        for r in rows.itertuples():
            colour, hatch = fills[int(r.warp) % len(fills)]
            ax.add_patch(
                Rectangle(
                    (r.block + 0.04, -r.warp + 0.05),
                    0.92,
                    0.9,
                    facecolor=colour,
                    hatch=hatch,
                    edgecolor=theme.paper,
                    linewidth=0,
                )
            )
            ax.text(
                r.block + 0.5,
                -r.warp + 0.5,
                str(r.block),
                ha="center",
                va="center",
                fontsize=style.SMALL,
                color=theme.paper,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0},
            )
        for w in range(warps):
            ax.text(-0.25, -w + 0.5, f"warp {w}", ha="right", va="center", fontsize=small)
        ax.set(xlim=(-2.3, blocks + 0.1), ylim=(-warps - 1.0, 1.05))
        if warps > 1:
            others = "warp 1" if warps == 2 else f"warps {style.span([str(w) for w in range(1, warps)])}"
            steps = f"then warp 0 adds {others}, and its 32 lanes fold in 5 steps:"
        else:
            steps = "then the 32 lanes fold in 5 steps:"
        ax.text(0, -warps + 0.45, steps, va="center", fontsize=small)
        ax.text(
            0,
            -warps - 0.4,
            f"{rows['value'].iloc[0]:.9g}, bits {rows['bits'].iloc[0]}".replace("-", "−"),
            va="center",
            fontsize=small,
            fontweight="bold",
        )
        ax.set_title(f"{n} token{'s' if n != 1 else ''} in the pass: {warps} warps")
        style.plain(ax)
        for t in ax.texts:
            t.set_in_layout(False)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    words = []
    for n, rows in data.groupby("columns", sort=True):
        mine = rows[rows["warp"] == 0]["block"]
        words.append(
            f"With {n} token{'s' if n != 1 else ''}, {int(rows['warps'].iloc[0])} warps: warp 0 sums blocks "
            f"{style.span(list(mine))}; the row's sum has the bits {rows['bits'].iloc[0]}."
        )
    same = _results(data)["bits"].nunique() == 1
    return (
        "The 16 blocks of a Q6_K row dealt out to warps. "
        + " ".join(words)
        + (" The bits agree." if same else " The bits differ.")
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    fused = bool(data["fused"].iloc[0])
    return (
        f"{data['source'].iloc[0]}. Every lane's integer dot products are exact; only where the scaled floats are added differs. "
        f"Multiply and add {'fused, as nvcc does by default' if fused else 'not fused'}."
    )
