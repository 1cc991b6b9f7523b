"""Picking the rows a figure shows out of a sweep, the same way everywhere."""

from __future__ import annotations

import functools
import json
import tomllib
from typing import Any

import pandas as pd

from hiraishin import paths
from hiraishin.figures.style import Frame

SETTINGS = ("model", "quant", "threads", "flash_attn", "kv_type")
"""Inputs that must be equal within one picture."""
ARMS = ("stock", "patched")
"""The two arms every comparison has; others (``patched-off``, ``patched-serial``, ``patched-without-...``) come after them."""


def in_order(arms: Any) -> list[str]:
    """Arms in the order they are drawn: stock, patched, then the rest by name."""
    found = sorted({str(a) for a in arms})
    return [a for a in ARMS if a in found] + [a for a in found if a not in ARMS]


def one_setting(frame: Frame, results: Any = None, **chosen: Any) -> Frame:
    """The rows of one model, quant, thread count, attention and KV type.

    Named ``chosen`` values filter first. Then what the profile is about is kept, where it was measured. Of what is left, the
    combination that covers the most builds, then the most rows, is taken; ties go to the first in alphabetical order, so that a
    rerun shows the same picture.
    """
    for column, value in chosen.items():
        if value is not None and column in frame.columns:
            frame = frame[frame[column] == value]
    for column, value in preferred(results).items():
        if chosen.get(column) is None and column in frame.columns and (frame[column] == value).any():
            frame = frame[frame[column] == value]
    keys = [k for k in SETTINGS if k in frame.columns]
    if frame.empty or not keys:
        return frame
    groups = [rows for _, rows in frame.groupby(keys, dropna=False, sort=True)]
    return max(groups, key=lambda rows: (rows["build"].nunique() if "build" in rows else 0, len(rows)))


def setting(frame: Frame) -> str:
    """The common setting in words, for a caption: model, quant, threads, attention, KV type."""
    if frame.empty:
        return ""
    row = frame.iloc[0]
    words = [str(row[k]) for k in ("model", "quant") if k in frame.columns and pd.notna(row[k])]
    if len(words) == 2 and words[1] in words[0]:
        words = words[:1]
    if "threads" in frame.columns and pd.notna(row["threads"]):
        words.append(f"{int(row['threads'])} thread{'s' if int(row['threads']) != 1 else ''}")
    if "flash_attn" in frame.columns and pd.notna(row["flash_attn"]):
        words.append("flash attention" if bool(row["flash_attn"]) else "no flash attention")
    if "kv_type" in frame.columns and pd.notna(row["kv_type"]):
        words.append(f"{row['kv_type']} KV cache")
    return ", ".join(words)


def named(arm: str) -> str:
    """How an arm is called in a picture: the patched build with its switch on is ``exact``."""
    known = {"patched": "exact", "patched-off": "patched, off", "patched-serial": "serial"}
    return known.get(arm, arm.replace("patched-without-", "exact without ").replace("+", ", "))


def drafter(name: str) -> str:
    """A drafter's canonical name (JSON) in words: ``draft model Q2_K, stops below margin 3``."""
    try:
        spec = json.loads(name)
    except ValueError:
        return f"drafter {name}"
    if not isinstance(spec, dict):
        return f"drafter {name}"
    kinds = {
        "model": f"draft model {spec.get('quant', '')}".strip(),
        "lookup": "prompt lookup",
        "replayed": "replayed trace",
    }
    words = [kinds.get(str(spec.get("kind")), f"drafter {spec.get('kind')}")]
    if spec.get("kind") == "model" and spec.get("margin") is not None:
        words.append(f"stopping below a margin of {spec['margin']:g}")
    if spec.get("kind") == "replayed" and spec.get("acceptance") is not None:
        words.append(f"{100 * spec['acceptance']:g} % right")
    return " ".join(words) if len(words) < 2 else f"{words[0]} {words[1]}"


@functools.cache
def published() -> dict[str, Any]:
    """The post's own numbers (``data/published/post.toml``): ``source`` and ``numbers``; empty when the file is not there.

    They are never mixed into a measured series: figures draw them apart, unconnected, and name the machine.
    """
    path = paths.ROOT / "data" / "published" / "post.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


RUN_KEYS = ("matrix", "drafter", "draft_length", "prefill", "client_guard")
"""Inputs that tell speculative runs apart besides the model's setting."""


def runs(results: Any, kind: str = "speculative") -> Frame:
    """One row a run: scalar inputs and record fields, and ``seconds_draft``, ``seconds_verify``, ... taken out of ``seconds``."""
    rows = []
    for r in results.of(kind):
        row = {k: v for k, v in {**r.inputs, **r.record}.items() if isinstance(v, (str, int, float, bool)) or v is None}
        seconds = r.record.get("seconds")
        if isinstance(seconds, dict):
            row.update({f"seconds_{k}": v for k, v in seconds.items()})
        rows.append({**row, "key": r.key})
    return pd.DataFrame(rows)


def one_matrix(frame: Frame, matrix: str | None = None) -> Frame:
    """The runs of one matrix, drafter, draft length and prefill; the evaluation if there is one, else the largest matrix."""
    if frame.empty:
        return frame
    if matrix is not None:
        frame = frame[frame["matrix"] == matrix]
    keys = [k for k in RUN_KEYS if k in frame.columns]
    if frame.empty or not keys:
        return frame
    groups = [rows for _, rows in frame.groupby(keys, dropna=False, sort=True)]

    def rank(rows: Frame) -> tuple[bool, int, int, int]:
        name = str(rows["matrix"].iloc[0]) if "matrix" in rows else ""
        return name.startswith("evaluation"), rows["build"].nunique(), rows["prompt"].nunique(), len(rows)

    return max(groups, key=rank)


def preferred(results: Any) -> dict[str, Any]:
    """What the profile is about, as filters: its quant and its settings. Empty without a profile."""
    profile = getattr(results, "profile", None)
    if profile is None:
        return {}
    settings = profile.settings
    return {
        "quant": profile.model.quant,
        "threads": settings.threads,
        "flash_attn": settings.flash_attn,
        "kv_type": settings.kv_type,
    }
