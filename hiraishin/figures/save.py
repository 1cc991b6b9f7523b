"""Write a figure with everything that belongs to it: two SVGs, a PNG, its data and where they come from.

Saving twice from the same results gives the same bytes: text stays text, the hash salt is fixed, no date is written, and the
provenance names the results instead of the moment.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from hiraishin import figures
from hiraishin.errors import UserError
from hiraishin.figures.slim import slim
from hiraishin.figures.style import THEMES, Theme
from hiraishin.results import Result, ResultSet


@dataclass
class Watched(ResultSet):
    """A result set that remembers which results were looked at, so that provenance lists those and no others."""

    used: dict[str, Result] = field(default_factory=dict)

    def of(self, kind: str, **inputs: Any) -> list[Result]:
        """Like `ResultSet.of`, remembering what it gives."""
        found = super().of(kind, **inputs)
        self.used.update((r.key, r) for r in found)
        return found


@dataclass(frozen=True)
class Saved:
    """What was written for one figure."""

    figure: str
    title: str
    notebook: str
    alt: str
    caption: str
    files: dict[str, Path]


def svg(figure: Figure, theme: Theme) -> bytes:
    """The figure as SVG bytes, the same on every run."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(theme.rc())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "hiraishin"})
    return slim(buffer.getvalue().decode()).encode()


def png(figure: Figure, theme: Theme) -> bytes:
    """The figure as PNG bytes (200 dots per inch)."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(theme.rc())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def provenance(used: dict[str, Result], results: ResultSet) -> dict[str, Any]:
    """Which results a figure was made from, on which machine, by which commit."""
    try:
        from hiraishin.provenance import commit  # late: the figures need nothing from it to draw

        made_by: Any = commit()
    except ImportError:
        made_by = None
    return {
        "commit": made_by,
        "machine": dict(results.machine or {}),
        "receipt": results.name,
        "results": [
            {"kind": r.kind, "key": r.key, "inputs": dict(r.inputs), "provenance": dict(r.provenance)}
            for r in sorted(used.values(), key=lambda r: (r.kind, r.key))
        ],
    }


def save(figure_id: str, results: ResultSet, out_dir: Path | str) -> Saved:
    """Draw one figure and write ``<id>.light.svg``, ``<id>.dark.svg``, ``<id>.png``, ``<id>.csv`` and ``<id>.json``.

    Raises UserError when there is no such figure, the results cannot carry it, or the folder cannot be written.
    """
    module = figures.find(figure_id)
    watched = Watched(results.profile, results.machine, results.results, results.name, list(results.missing))
    data = module.data(watched)
    drawn = {name: module.draw(data, theme) for name, theme in THEMES.items()}
    alt, caption = module.alt(data), module.caption(data)
    about = {
        "figure": figure_id,
        "title": module.TITLE,
        "notebook": module.NOTEBOOK,
        "alt": alt,
        "caption": caption,
        **provenance(watched.used, results),
    }
    blobs = {
        f"{figure_id}.light.svg": svg(drawn["light"], THEMES["light"]),
        f"{figure_id}.dark.svg": svg(drawn["dark"], THEMES["dark"]),
        f"{figure_id}.png": png(drawn["light"], THEMES["light"]),
        f"{figure_id}.csv": _csv(data),
        f"{figure_id}.json": json.dumps(_plain(about), indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n",
    }
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, blob in blobs.items():
            (out / name).write_bytes(blob)
    except OSError as error:
        raise UserError(
            f"cannot write figure {figure_id} to {out}: {error.strerror or error}", "Choose another folder."
        ) from error
    files = {name.removeprefix(f"{figure_id}."): out / name for name in blobs}
    return Saved(figure_id, module.TITLE, module.NOTEBOOK, alt, caption, files)


def _csv(data: pd.DataFrame) -> bytes:
    """UTF-8, minimal quotes, floats as Python prints them (shortest text that reads back to the same bits)."""
    return data.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL).encode()


def _plain(value: Any) -> Any:
    """JSON without NaN: what is not a number becomes null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return _plain(value.item())
    return value
