"""Which parallel block sums which chunk of the KV cache, for two queries, and whether the output's bits survive."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hiraishin.figures import style
from hiraishin.figures.style import Frame, Theme
from hiraishin.numerics.attention import Attention, cpu_attention, cpu_chunks, exp32, gpu_attention, made_up_cache
from hiraishin.numerics.floats import bits
from hiraishin.numerics.occupancy import CHUNK, Gpu, VectorAttention, chunk_owners, padded
from hiraishin.results import ResultSet

ID = "parallel-blocks"
TITLE = "Another number of parallel blocks, another sum"
NOTEBOOK = "06_parallel_blocks"
HEAD = 128


def data(
    results: ResultSet | None = None,
    *,
    queries: tuple[int, ...] = (300, 390),
    p: tuple[int, int] | None = None,
    batch: int = 2,
    threads: int = 2,
    sms: int = 26,
    seed: int = 0,
) -> Frame:
    """One row per query position, kernel, arm (``alone``, ``batch``) and chunk: its cells, its part, the output's bits.

    ``p`` gives P alone and in the batch; without it both come from the occupancy model of ``sms`` SMs. ``differing`` of
    ``head`` output numbers have other bits than alone. The cache is made up (normal distribution). Needs no results.
    """
    rows: list[dict[str, object]] = []
    for position in queries:
        cells = padded(position + 1)
        model = VectorAttention(Gpu(sms))
        pair = p or (model.p(1, cells), model.p(batch, cells))
        q, k, v = made_up_cache(cells, HEAD, seed)
        gpu = [gpu_attention(q, k, v, position, n) for n in pair]
        for arm, n, out in zip(("alone", "batch"), pair, gpu, strict=True):
            chunks = [(c * CHUNK, min((c + 1) * CHUNK, cells), owner) for c, owner in enumerate(chunk_owners(cells, n))]
            rows += _rows("GPU", arm, position, n, chunks, out, gpu[0])
        cpu = [cpu_attention(q, k, v, position, threads, queries=n, exp=exp32) for n in (1, batch)]
        for arm, n, out in zip(("alone", "batch"), (1, batch), cpu, strict=True):
            chunks = [(start, stop, part) for part, (start, stop) in enumerate(cpu_chunks(cells, threads, n))]
            rows += _rows("CPU", arm, position, len(chunks), chunks, out, cpu[0])
    return pd.DataFrame(rows).assign(head=HEAD, threads=threads, sms=sms, batch=batch)


def _rows(
    kernel: str,
    arm: str,
    position: int,
    parts: int,
    chunks: list[tuple[int, int, int]],
    out: Attention,
    alone: Attention,
) -> list[dict[str, object]]:
    differing = int((out.output.view(np.uint32) != alone.output.view(np.uint32)).sum())
    return [
        {
            "kernel": kernel,
            "arm": arm,
            "query": position,
            "parts": parts,
            "start": start,
            "stop": stop,
            "part": part,
            "real_cells": int(np.clip(position + 1 - start, 0, stop - start)),
            "first_output_bits": bits(out.output[0]),
            "differing": differing,
        }
        for start, stop, part in chunks
    ]


def _outcomes(data: Frame, kernel: str) -> Frame:
    rows = data[(data["kernel"] == kernel) & (data["arm"] == "batch")]
    return rows.drop_duplicates("query").sort_values("query")


def _words(data: Frame, kernel: str) -> str:
    out = _outcomes(data, kernel)
    head = int(data["head"].iloc[0])
    return style.span(
        [
            f"{r.differing if r.differing else 'none'} of {head} output numbers change for the query at {r.query}"
            for r in out.itertuples()
        ]
    )


def _title(data: Frame) -> str:
    gpu = data[data["kernel"] == "GPU"]
    alone, batch = (int(gpu[gpu["arm"] == arm]["parts"].iloc[-1]) for arm in ("alone", "batch"))
    same = [str(r.query) for r in _outcomes(data, "GPU").itertuples() if not r.differing]
    other = [str(r.query) for r in _outcomes(data, "GPU").itertuples() if r.differing]
    if not other:
        return f"P = {alone} alone and P = {batch} in a batch: no query changes here"
    kept = f"a query at {style.span(same)} keeps its bits, " if same else ""
    return f"P = {alone} alone, P = {batch} in a batch: {kept}one at {style.span(other)} does not"


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Bars to scale in cells; a colour and hatch per part; cells past the query are masked and pale."""
    style.require(data, ID, "chunks", ("kernel", "arm", "first_output_bits"), ("query", "start", "stop", "part"))
    queries = sorted(int(x) for x in data["query"].unique())
    order = [("GPU", "alone"), ("GPU", "batch"), ("CPU", "alone"), ("CPU", "batch")]
    order = [o for o in order if ((data["kernel"] == o[0]) & (data["arm"] == o[1])).any()]
    figure = style.new(1.05 + len(queries) * (0.55 + 0.42 * len(order)), _title(data))
    axes = figure.subplots(len(queries), 1, squeeze=False)[:, 0]
    fills = [(theme.exact, ""), (theme.stock, "//"), (theme.third, ".."), (theme.fourth, "xx")]
    end = int(data["stop"].max())
    small = style.SMALL
    for ax, query in zip(axes, queries, strict=True):
        for level, (kernel, arm) in enumerate(order):
            rows = data[(data["query"] == query) & (data["kernel"] == kernel) & (data["arm"] == arm)]
            y = -level - (0.25 if kernel == "CPU" else 0)
            for r in rows.itertuples():
                colour, hatch = fills[int(r.part) % len(fills)]
                real = int(r.real_cells)
                if real:
                    ax.add_patch(
                        Rectangle(
                            (r.start, y - 0.38),
                            real,
                            0.76,
                            facecolor=colour,
                            hatch=hatch,
                            edgecolor=theme.paper,
                            linewidth=0,
                        )
                    )
                if real < r.stop - r.start:
                    ax.add_patch(
                        Rectangle(
                            (r.start + real, y - 0.38),
                            r.stop - r.start - real,
                            0.76,
                            facecolor=theme.faint,
                            edgecolor=colour,
                            linewidth=1.0,
                            linestyle=":",
                        )
                    )
                ax.plot([r.stop, r.stop], [y - 0.38, y + 0.38], color=theme.paper, linewidth=2)
                boxed = {"facecolor": colour if real > 60 else theme.faint, "edgecolor": "none", "pad": 0.8}
                where = r.start + (real / 2 if real > 60 else (r.stop - r.start) / 2)
                ax.text(
                    where,
                    y,
                    str(int(r.part)),
                    ha="center",
                    va="center",
                    fontsize=small,
                    color=theme.paper if real > 60 else theme.ink,
                    bbox=boxed,
                )
            first = rows.iloc[0]
            label = (
                f"GPU, P = {int(first['parts'])}"
                if kernel == "GPU"
                else ("CPU, alone" if arm == "alone" else "CPU, batch")
            )
            ax.text(-8, y, label, ha="right", va="center", fontsize=small + 0.5)
            outcome = (
                "alone"
                if arm == "alone"
                else (f"{int(first['differing'])}/{int(first['head'])} differ" if first["differing"] else "same bits")
            )
            ax.text(
                end + 8,
                y,
                outcome,
                ha="left",
                va="center",
                fontsize=small + 0.5,
                color=theme.stock if arm == "batch" and first["differing"] else theme.ink,
            )
        ax.axvline(query + 1, ymin=0.0, ymax=0.98, color=theme.ink, linewidth=1.6)
        ax.set(xlim=(-0.25 * end, end * 1.28), ylim=(-len(order) - 0.05, 0.6))
        ax.set_title(f"a query at KV position {query}")
        ax.set_yticks([])
        ax.set_xticks(range(0, end + 1, CHUNK))
        ax.spines["left"].set_visible(False)
        ax.spines["bottom"].set_bounds(0, end)
        for t in ax.texts:
            t.set_in_layout(False)
    axes[-1].set_xlabel(
        "KV cells; numbers: the part that sums them; pale: masked\nx/y differ: output numbers whose bits are not those "
        "of the lone query"
    )
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    gpu = data[data["kernel"] == "GPU"]
    alone, batch = (int(gpu[gpu["arm"] == arm]["parts"].iloc[-1]) for arm in ("alone", "batch"))
    return (
        f"Chunks of {CHUNK} KV cells dealt to P parallel blocks, P = {alone} for a lone query and P = {batch} in a batch. "
        f"On the GPU {_words(data, 'GPU')}. "
        f"On the CPU, which splits the range over {int(data['threads'].iloc[0])} threads for a lone query only, "
        f"{_words(data, 'CPU')}."
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    return (
        f"P from the occupancy model of a GPU with {int(data['sms'].iloc[0])} SMs, 32 heads of 128, "
        f"{int(data['batch'].iloc[0])} queries in the batch; outputs from a model of both kernels "
        "on a made-up cache. A fully masked chunk adds exact zeros wherever it lands; one with real cells changes the "
        "order of additions."
    )
