"""Where a batch of tokens changes the logits: width by position, stock above patched."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "replay-map"
TITLE = "Where a batch changes the logits"
NOTEBOOK = "03_replay"
ARMS = select.ARMS
PANELS = 6  # more would be too narrow to read
BOUNDARY = 256  # cells to which llama.cpp rounds the attended range up


def data(results: ResultSet, *, prompt: str | None = None, quant: str | None = None) -> Frame:
    """One row per arm, trace, width and position: KV position, largest logit difference, differing, flip.

    Of many traces the ``PANELS`` with the most rows are kept. Width 1, a control, is left out.
    """
    frame = select.replays(results, quant=quant, prompt=prompt)
    if frame.empty:
        return frame
    frame = frame.assign(panel=frame["prompt"].astype(str) + " from " + frame["start"].astype(str))
    traces = frame.groupby("panel")["position"].agg(lambda x: (len(x), int(x.max())))
    kept = sorted(traces.index, key=lambda p: (tuple(-n for n in traces[p]), p))[:PANELS]
    frame = frame[frame["panel"].isin(kept)].assign(traces=len(traces))
    columns = [
        *select.SETTINGS,
        "traces",
        "build",
        "prompt",
        "panel",
        "width",
        "position",
        "kv_position",
        "max_abs_diff",
    ]
    frame = frame[[*(c for c in columns if c in frame.columns), "differing", "flip"]]
    return frame.sort_values(
        ["build", "panel", "width", "position"], ascending=[False, True, True, True], ignore_index=True
    )


def _counts(data: Frame) -> dict[str, dict[str, float]]:
    out = {}
    for arm in [a for a in ARMS if (data["build"] == a).any()] + sorted(set(data["build"]) - set(ARMS)):
        rows = data[data["build"] == arm]
        bad = rows[rows["differing"].astype(bool)]
        out[arm] = {
            "rows": len(rows),
            "differing": len(bad),
            "flips": int(rows["flip"].astype(bool).sum()),
            "largest": float(rows["max_abs_diff"].max()),
            "first_width": int(bad["width"].min()) if len(bad) else 0,
            "widths": rows["width"].nunique(),
        }
    return out


def _said(arm: str, c: dict[str, float]) -> str:
    if not c["differing"]:
        return f"{arm}: all {c['rows']:,.0f} logit rows exact"
    return f"{arm}: {c['differing']:,.0f} of {c['rows']:,.0f} rows differ, {style.count(int(c['flips']), 'flip')}"


def _panels(data: Frame) -> list[str]:
    """Traces by how far they reach, shortest first: the order of the panels."""
    reach = data.groupby("panel")["kv_position"].max()
    return sorted((str(p) for p in reach.index), key=lambda p: (reach[p], p))


def _marks(start: int, stop: int, inches: float) -> list[int]:
    """Round KV positions to label within a panel so many inches wide; at least one."""
    step = 64
    while (stop - start) / step * 0.46 > inches:
        step *= 2
    marks = [t for t in range(0, stop + 1, step) if t >= start]
    middle = (start + stop) // 2
    return marks or [middle // 16 * 16 if start <= middle // 16 * 16 < stop else middle]


def _title(data: Frame) -> str:
    return "; ".join(_said(arm, c) for arm, c in _counts(data).items()).capitalize()


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """A strip per width, coloured by the difference on a log scale; flips are crosses, multiples of 256 are dotted lines."""
    style.require(
        data, ID, "replays", ("build", "panel", "differing", "flip"), ("width", "kv_position", "max_abs_diff")
    )
    counts = _counts(data)
    panels = _panels(data)
    widths = sorted(int(w) for w in data["width"].unique())
    extents = {p: (int(r["kv_position"].min()), int(r["kv_position"].max()) + 1) for p, r in data.groupby("panel")}
    ratios = [max(extents[p][1] - extents[p][0], 1) for p in panels]
    figure = style.new(1.55 + (0.62 + 0.19 * len(widths)) * len(counts), _title(data))
    grid = figure.subplots(len(counts), len(panels), squeeze=False, sharex="col", width_ratios=ratios)
    positive = data.loc[data["max_abs_diff"] > 0, "max_abs_diff"]
    low, high = (float(positive.quantile(0.02)), float(positive.max())) if len(positive) else (1e-3, 1.0)
    norm = LogNorm(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high * 1.0001)), clip=True)
    image: Any = None
    for i, arm in enumerate(counts):
        for j, panel in enumerate(panels):
            axes = grid[i, j]
            rows = data[(data["build"] == arm) & (data["panel"] == panel)]
            start, stop = extents[panel]
            cells = np.full((len(widths), stop - start), np.nan)
            at_y = rows["width"].map({w: k for k, w in enumerate(widths)}).to_numpy(int)
            at_x = rows["kv_position"].to_numpy(int) - start
            cells[at_y, at_x] = np.where(rows["differing"].astype(bool), rows["max_abs_diff"], np.nan)
            measured = np.full(cells.shape, np.nan)
            measured[at_y, at_x] = 0.0
            place: Any = {
                "extent": (start, stop, -0.5, len(widths) - 0.5),
                "origin": "lower",
                "aspect": "auto",
                "interpolation": "none",
            }
            axes.imshow(np.ma.masked_invalid(measured), cmap=ListedColormap([theme.faint]), **place)
            image = axes.imshow(np.ma.masked_invalid(cells), cmap=theme.sequential, norm=norm, **place)
            flips = rows["flip"].astype(bool).to_numpy()
            axes.plot(
                at_x[flips] + start + 0.5,
                at_y[flips],
                "x",
                color=theme.ink,
                markersize=5,
                markeredgewidth=1.6,
                linestyle="none",
            )
            for edge in range((start // BOUNDARY + 1) * BOUNDARY, stop, BOUNDARY):
                axes.axvline(edge, color=theme.ink, linestyle=(0, (1, 1.5)), linewidth=1.4)
            axes.hlines(np.arange(1, len(widths)) - 0.5, start, stop, color=theme.paper, linewidth=1.2)
            axes.set(xlim=(start, stop), ylim=(-0.5, len(widths) - 0.5), yticks=range(len(widths)))
            axes.set_yticklabels([str(w) for w in widths] if j == 0 else [])
            axes.tick_params(length=0)
            axes.set_xticks(_marks(start, stop, 5.1 * ratios[j] / sum(ratios)))
            if j == 0:
                axes.set_title(arm)
        grid[i, 0].set_ylabel("pass width")
    grid[-1, int(np.argmax(ratios))].set_xlabel("KV position")
    bar = figure.colorbar(image, ax=grid.ravel().tolist(), location="bottom", aspect=45, pad=0.02, shrink=0.8)
    bar.set_label("largest logit difference (grey: exact, ×: argmax flipped)")
    bar.outline.set_visible(False)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    words = []
    for arm, c in _counts(data).items():
        if c["differing"]:
            words.append(
                f"On {arm}, {c['differing']:,.0f} of {c['rows']:,.0f} logit rows differ from the one-token pass, from "
                f"width {c['first_width']} on, by up to {c['largest']:.3g}, with {style.count(int(c['flips']), 'argmax flip')}."
            )
        else:
            words.append(f"On {arm}, all {c['rows']:,.0f} logit rows are equal bit for bit to the one-token pass.")
    return f"Maps of pass width by position for {style.count(data['panel'].nunique(), 'trace')}. " + " ".join(words)


def caption(data: Frame) -> str:
    """The line under the picture."""
    first, last = int(data["kv_position"].min()), int(data["kv_position"].max())
    panels = _panels(data)
    names = [
        p if data.loc[data["panel"] == p, "prompt"].iloc[0] in panels else p.replace(" from ", " from cell ")
        for p in panels
    ]
    some = (
        f" ({len(panels)} of {int(data['traces'].iloc[0])} traces)" if int(data["traces"].iloc[0]) > len(panels) else ""
    )
    widths = style.span(sorted(int(w) for w in data["width"].unique()))
    return (
        f"{select.setting(data)}; panels: {style.span(names)}{some}; widths {widths}, KV positions {first} to {last}. "
        "Each row of logits of a replayed batch against the same build's one-token pass, bit for bit; grey is exact, "
        "empty is not measured. Dotted: multiples of 256, where the attended range grows."
    )
