"""Find text that is cut off by the edge of a figure or lies on other text."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def _drawn(figure: Figure) -> list[Text]:
    """The texts matplotlib really draws: of ticks only those within the axes' view, of hidden axes no ticks at all."""
    out: list[Text] = [*figure.texts]
    for legend in figure.legends:
        out += legend.get_texts()
    axes: Any  # what is drawn is known to private members only
    for axes in figure.axes:
        out += [axes.title, axes._left_title, axes._right_title, *axes.texts]
        if axes.get_legend() is not None:
            out += axes.get_legend().get_texts()
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                out += [axis.label, *(tick.label1 for tick in axis._update_ticks())]
    return out


def _texts(figure: Figure) -> list[tuple[str, float, Bbox]]:
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = []
    for text in _drawn(figure):
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent(renderer)
            if box.width > 0 and box.height > 0:
                found.append((text.get_text(), float(text.get_fontsize()), box))
    return found


def problems(figure: Figure, smallest: float) -> list[str]:
    """What is wrong with the figure's text: cut off, overlapping, or smaller than ``smallest`` points."""
    edge = figure.bbox
    texts = _texts(figure)
    out = [
        f"cut off: {t!r}"
        for t, _, b in texts
        if b.x0 < -0.5 or b.y0 < -0.5 or b.x1 > edge.x1 + 0.5 or b.y1 > edge.y1 + 0.5
    ]
    out += [f"smaller than {smallest} points: {t!r}" for t, size, _ in texts if size < smallest]
    for i, (first, _, a) in enumerate(texts):
        for second, _, b in texts[i + 1 :]:
            wide = min(a.x1, b.x1) - max(a.x0, b.x0)
            high = min(a.y1, b.y1) - max(a.y0, b.y0)
            if wide > 1.0 and high > 2.0:
                out.append(f"overlap: {first!r} and {second!r}")
    return out
