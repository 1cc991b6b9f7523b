"""Three numbers in two orders, and a real Q6_K row in two orders; both computed, neither drawn by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import style
from hiraishin.figures.style import Frame, Theme
from hiraishin.numerics import bits, mul_mat_vec_q6_k, nwarps_for, real_row, spacing, sum_in_order
from hiraishin.results import ResultSet

ID = "float-order"
TITLE = "The order of additions changes the sum"
NOTEBOOK = "02_float_order"

NUMBERS = (100_000_000.0, 1.0, -100_000_000.0)
ORDERS = ((0, 1, 2), (0, 2, 1))


def data(
    results: ResultSet | None = None,
    *,
    numbers: tuple[float, ...] = NUMBERS,
    row: int = 0,
    columns: tuple[int, ...] = (1, 5),
) -> Frame:
    """Sums of ``numbers`` in two orders (part ``three``) and of a stored row at the warp counts of ``columns`` (part ``row``).

    Part ``grid`` holds the numbers' spacing, part ``exact`` the row's sum with exact arithmetic. Needs no results.
    """
    rows: list[dict[str, object]] = [
        {"part": "grid", "label": f"{numbers[0]:.0f}", "value": spacing(numbers[0]), "bits": bits(spacing(numbers[0]))}
    ]
    for order in ORDERS:
        total = sum_in_order(numbers, order)
        first = np.float32(numbers[order[0]]) + np.float32(numbers[order[1]])
        rows.append(
            {
                "part": "three",
                "label": " ".join(f"{numbers[i]:+.0f}" for i in order),
                "value": float(total),
                "bits": bits(total),
                "between": float(first),
            }
        )
    real = real_row(row)
    exact = exact_sum(row)
    for n in columns:
        warps = nwarps_for(n)
        out = mul_mat_vec_q6_k(real.packed, real.quants, real.scales8, warps)
        steps = (float(out.value) - exact) / abs(spacing(exact))
        rows.append(
            {
                "part": "row",
                "label": real.source,
                "columns": n,
                "warps": warps,
                "value": float(out.value),
                "bits": bits(out.value),
                "steps_from_exact": steps,
            }
        )
    rows.append({"part": "exact", "label": real.source, "value": exact, "bits": bits(exact), "steps_from_exact": 0.0})
    return pd.DataFrame(rows)


def exact_sum(row: int) -> float:
    """The stored row's dot product from the same quants and scales, without a rounding on the way (correctly rounded float64)."""
    from hiraishin.numerics.matvec import lane_products

    real = real_row(row)
    return math.fsum(lane_products(real.packed, real.quants, real.scales8))


def _found(data: Frame) -> tuple[Frame, Frame, int]:
    three, row = data[data.part == "three"], data[data.part == "row"]
    patterns = [int(b, 16) for b in row.bits]
    apart = max(patterns) - min(patterns) if patterns else 0
    return three, row, apart


def _spelled(label: str) -> str:
    """``+100000000 +1 -100000000`` as ``(100,000,000 + 1) − 100,000,000``."""
    first, second, third = (f"{float(v):+,.0f}".replace("-", "−") for v in label.split())
    return f"({first.lstrip('+')} {second[0]} {second[1:]}) {third[0]} {third[1:]}"


def _title(data: Frame) -> str:
    three, row, apart = _found(data)
    sums = style.span(sorted({f"{v:g}" for v in three.value}))
    real = f"{apart} float step{'s' if apart != 1 else ''} apart" if apart else "equal"
    many = "one sum" if three.value.nunique() == 1 else "two sums"
    return (
        f"Three numbers, two orders, {many}: {sums}. A real weight row under "
        f"{style.span(sorted(set(row.warps.astype(int)))[::-1])} warps: {real}"
    )


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Two number lines, both to scale, marked where float32 has values."""
    style.require(data, ID, "sums", ("part", "label", "bits"), ())
    style.require(data[data.part.isin(["three", "row", "exact"])], ID, "sums", (), ("value",))
    three, row, _ = _found(data)
    if three.empty or row.empty or not (data.part == "exact").any():
        style.require(data[data.part == "none"], ID, "sums of three numbers, or of a row,")
    figure = style.new(5.0, _title(data))
    top, bottom = figure.subplots(2, 1, height_ratios=(1.25, 1))

    # Near the first number: what float32 can hold, and what 1 more becomes.
    start = float(data[data.part == "grid"].label.iloc[0])
    gap = float(data[data.part == "grid"].value.iloc[0])
    grid = np.arange(-2, 3) * gap
    small = style.SMALL + 0.5
    top.hlines(0, grid[0] - gap / 2, grid[-1] + gap / 2, color=theme.muted, linewidth=1)
    top.plot(grid, np.zeros_like(grid), "|", color=theme.ink, markersize=14, markeredgewidth=1.6)
    for g in grid:
        top.text(
            g, -0.4, f"{g:+.0f}".replace("-", "−") if g else f"{start:,.0f}", ha="center", va="top", fontsize=small
        )
    top.plot([1], [0], "o", markerfacecolor=theme.paper, markeredgecolor=theme.stock, markeredgewidth=1.8, markersize=8)
    top.annotate(
        "",
        xy=(0, 0.3),
        xytext=(1, 0.3),
        arrowprops={"arrowstyle": "->", "color": theme.stock, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0},
    )
    top.text(
        1.6,
        0.62,
        f"+1 falls between two float32\nvalues {gap:g} apart and rounds back",
        color=theme.stock,
        va="center",
        ha="left",
        fontsize=small,
    )
    for k, r in enumerate(three.itertuples()):
        top.text(
            grid[0] - gap / 2,
            2.0 - 0.55 * k,
            f"{_spelled(str(r.label))} = {r.value:g}",
            family="monospace",
            fontsize=style.TEXT,
            va="center",
        )
    top.set(xlim=(grid[0] - gap / 2, grid[-1] + gap / 2), ylim=(-0.95, 2.3))
    style.plain(top)

    # The row: float32 values around the exact sum, one step apart.
    steps = row.steps_from_exact.to_numpy(float)
    exact = float(data[data.part == "exact"].value.iloc[0])
    offset = (float(np.float32(exact)) - exact) / abs(spacing(exact))  # where the nearest float32 lies
    reach = max(4.0, float(np.abs(steps).max()) + 2.5)
    ticks = np.arange(-math.ceil(reach), math.ceil(reach) + 1) + offset
    ticks = ticks[np.abs(ticks) <= reach]
    bottom.hlines(0, -reach, reach, color=theme.muted, linewidth=1)
    bottom.plot(ticks, np.zeros_like(ticks), "|", color=theme.ink, markersize=12, markeredgewidth=1.4)
    bottom.vlines(0, -0.5, 0.5, color=theme.muted, linestyle=":", linewidth=1.6)
    bottom.text(0, -0.62, "exact sum", ha="center", va="top", color=theme.muted, fontsize=small)
    looks = {4: ("o", theme.exact), 2: ("s", theme.stock)}
    # Labels stand at the ends, with a line to their mark: the marks may lie anywhere, even on one spot.
    apart = row.assign(steps=steps).drop_duplicates("warps").sort_values("steps")
    placed = list(apart.itertuples())
    for k, r in enumerate(placed):
        marker, colour = looks[int(r.warps)]
        right = k == len(placed) - 1 and len(placed) > 1
        end = reach if right else -reach
        bottom.plot([r.steps, end * 0.72], [0, 0.95], color=colour, linewidth=1.2)
        bottom.plot([r.steps], [0], marker, color=colour, markersize=9, clip_on=False)
        text = f"{int(r.warps)} warps ({'1 to 4' if r.warps == 4 else '5 to 8'} tokens)\n{r.value:.9g}\nbits {r.bits}"
        bottom.text(
            end,
            1.05,
            text.replace("\n-", "\n−"),
            ha="right" if right else "left",
            va="bottom",
            color=colour,
            fontsize=small,
            linespacing=1.3,
        )
    bottom.set(xlim=(-reach, reach), ylim=(-1.1, 2.6))
    bottom.set_title("One real Q6_K row of 4,096; every mark is a float32 value")
    style.plain(bottom)
    for text_ in (*top.texts, *bottom.texts):
        text_.set_in_layout(False)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    three, row, apart = _found(data)
    gap = float(data[data.part == "grid"].value.iloc[0])
    sums = style.span([f"{v:g}" for v in three.value])
    parts = style.span([f"{r.value:.9g} (bits {r.bits}) with {int(r.warps)} warps" for r in row.itertuples()])
    ends = f"{apart} float32 steps apart" if apart else "the same bits"
    return (
        f"Two number lines. Near 100,000,000 float32 values are {gap:g} apart, so the same three numbers added in two "
        f"orders give {sums}. "
        f"A real Q6_K row of 4,096 weights sums to {parts}: {ends}."
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    _, row, apart = _found(data)
    return (
        f"Computed bit by bit, not sketched. Row: {row.label.iloc[0]}; real activations, quantized to 8 bits. The kernel uses "
        f"{int(row.warps.iloc[0])} warps for {int(row['columns'].iloc[0])} column and {int(row.warps.iloc[-1])} for "
        f"{int(row['columns'].iloc[-1])}: "
        f"{'the results differ by ' + str(apart) + ' float32 steps' if apart else 'the results are equal'}. Assumes the "
        "compiler fuses multiply and add."
    )
