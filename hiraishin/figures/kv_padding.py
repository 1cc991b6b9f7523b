"""The range a token attends over: alone, and inside a batch that crosses a multiple of 256."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import style
from hiraishin.figures.style import Frame, Theme
from hiraishin.numerics.attention import cpu_attention, cpu_chunks, exp32, gpu_attention, made_up_cache
from hiraishin.numerics.occupancy import PADDING, Gpu, VectorAttention, padded
from hiraishin.results import ResultSet

ID = "kv-padding"
TITLE = "A batch that crosses 256 attends over a longer range"
NOTEBOOK = "05_padding"
HEAD = 64


def data(
    results: ResultSet | None = None,
    *,
    boundary: int = PADDING,
    before: int = 4,
    width: int = 9,
    threads: int = 3,
    sms: int = 26,
) -> Frame:
    """One row per token of a batch that starts ``before`` tokens ahead of ``boundary``. Needs no results.

    ``alone`` and ``batch`` are the attended cells; ``gpu_differing`` and ``cpu_differing`` count the output numbers
    that change when nothing but the range does (the same lone-query kernel over both ranges, on a made-up cache).
    """
    first = boundary - before
    batch = padded(first + width)
    q, k, v = made_up_cache(batch, HEAD, seed=boundary)
    gpu = VectorAttention(Gpu(sms))
    rows = []
    for token in range(width):
        position = first + token
        alone = padded(position + 1)
        p_alone, p_batch = gpu.p(1, alone), gpu.p(1, batch)
        rows.append(
            {
                "token": token,
                "position": position,
                "real": position + 1,
                "alone": alone,
                "batch": batch,
                "p_alone": p_alone,
                "p_batch": p_batch,
                "sms": sms,
                "threads": threads,
                "gpu_differing": _differ(
                    gpu_attention(q, k, v, position, p_alone).output, gpu_attention(q, k, v, position, p_batch).output
                ),
                "cpu_parts_alone": len(cpu_chunks(alone, threads)),
                "cpu_parts_batch": len(cpu_chunks(batch, threads)),
                "cpu_differing": _differ(
                    cpu_attention(q, k, v, position, threads, cells=alone, exp=exp32).output,
                    cpu_attention(q, k, v, position, threads, cells=batch, exp=exp32).output,
                ),
                "head": HEAD,
            }
        )
    return pd.DataFrame(rows)


def _differ(a: np.ndarray, b: np.ndarray) -> int:
    return int((a.view(np.uint32) != b.view(np.uint32)).sum())


def _longer(data: Frame) -> Frame:
    return data[data["batch"] > data["alone"]]


def _title(data: Frame) -> str:
    longer = _longer(data)
    if longer.empty:
        return f"This batch of {len(data)} crosses no multiple of {PADDING}: every token has its own range"
    return (
        f"{len(longer)} of {len(data)} tokens of this batch attend over {int(longer['batch'].iloc[0])} cells instead of "
        f"{int(longer['alone'].iloc[0])}"
    )


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Two stacks of bars to scale: solid up to the token itself, hatched for masked cells that the kernel still walks."""
    style.require(data, ID, "tokens", (), ("position", "real", "alone", "batch"))
    figure = style.new(1.6 + 0.36 * len(data), _title(data))
    panels = figure.subplots(2, 1, sharex=True)
    small = style.SMALL + 0.5
    end = int(data["batch"].max())
    for ax, column, name in (
        (panels[0], "alone", "each token alone"),
        (panels[1], "batch", f"the same tokens in one batch of {len(data)}"),
    ):
        y = np.arange(len(data))[::-1]
        longer = (data["batch"] > data["alone"]).to_numpy() & (column == "batch")
        colours = [theme.stock if x else theme.exact for x in longer]
        ax.barh(y, data["real"], height=0.74, color=colours)
        ax.barh(
            y,
            data[column] - data["real"],
            left=data["real"],
            height=0.74,
            facecolor=theme.faint,
            hatch="///",
            edgecolor=theme.muted,
            linewidth=0.6,
        )
        for mark in range(PADDING, end + 1, PADDING):
            ax.axvline(mark, color=theme.ink, linestyle=(0, (1, 1.5)), linewidth=1.4)
        for yy, r in zip(y, data.itertuples(), strict=True):
            ax.text(end * 1.015, yy, f"{int(getattr(r, column))}", va="center", fontsize=small, color=theme.ink)
        ax.set(
            xlim=(0, end * 1.09),
            ylim=(-0.6, len(data) - 0.4),
            yticks=[y[0], y[-1]],
            yticklabels=[str(int(data["position"].iloc[0])), str(int(data["position"].iloc[-1]))],
        )
        ax.set_title(name)
        ax.set_ylabel("position")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    panels[1].set_xticks(range(0, end + 1, PADDING // 2))
    panels[1].set_xlabel("KV cells attended over (hatched: masked)")
    return figure


def _bits(data: Frame) -> str:
    longer = _longer(data)
    if longer.empty:
        return "Nothing changes for any of them."
    gpu, cpu = int((longer["gpu_differing"] > 0).sum()), int((longer["cpu_differing"] > 0).sum())
    row = longer.iloc[-1]
    return (
        f"The longer range alone changes the bits of {gpu} of {len(longer)} of them in the GPU model (P from "
        f"{int(row['p_alone'])} to {int(row['p_batch'])} on {int(row['sms'])} SMs) "
        f"and of {cpu} of {len(longer)} on a CPU with {int(row['threads'])} threads, which cuts the padded range into "
        f"{int(row['cpu_parts_batch'])} parts instead of {int(row['cpu_parts_alone'])}."
    )


def alt(data: Frame) -> str:
    """The finding in words."""
    longer = _longer(data)
    first, last = int(data["position"].iloc[0]), int(data["position"].iloc[-1])
    if longer.empty:
        return (
            f"Bars for {len(data)} tokens at positions {first} to {last}: alone and in the batch each attends over the same "
            f"range. {_bits(data)}"
        )
    return (
        f"Bars for {len(data)} tokens at positions {first} to {last}. Alone, the first {len(longer)} attend over "
        f"{int(longer['alone'].iloc[0])} cells; "
        f"in the batch all attend over {int(longer['batch'].iloc[0])}. {_bits(data)}"
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    return (
        f"llama.cpp rounds the used cells up to a multiple of {PADDING}, for the whole pass at once. {_bits(data)} The guard "
        "ends every verify batch at the multiple instead."
    )
