"""Picking the rows a figure shows out of a sweep, the same way everywhere."""

from __future__ import annotations

from typing import Any

import pandas as pd

SETTINGS = ("model", "quant", "threads", "flash_attn", "kv_type")
"""Inputs that must be equal within one picture."""


def with_arm(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the column ``arm``: ``stock``, ``patched`` (switch on), ``off`` or ``serial``; read from build and switch if absent."""
    if frame.empty or "arm" in frame.columns:
        return frame

    def name(row: Any) -> str:
        switch = row.get("switch", None)
        if row["build"] == "stock":
            return "stock"
        if switch in (-1, "serial"):
            return "serial"
        return "off" if switch in (0, "0", "off", None) and "switch" in row else "patched"

    return frame.assign(arm=[name(row) for row in frame.to_dict("records")])


def one_setting(frame: pd.DataFrame, **chosen: Any) -> pd.DataFrame:
    """The rows of one model, quant, thread count, attention and KV type.

    Named ``chosen`` values filter first. Of what is left, the combination that covers the most arms, then the most rows, is taken;
    ties go to the first in alphabetical order, so that a rerun shows the same picture.
    """
    for column, value in chosen.items():
        if value is not None and column in frame.columns:
            frame = frame[frame[column] == value]
    keys = [k for k in SETTINGS if k in frame.columns]
    if frame.empty or not keys:
        return frame
    groups = [(key, rows) for key, rows in frame.groupby(keys, dropna=False, sort=True)]
    arms = "arm" if "arm" in frame.columns else "build"
    best = max(groups, key=lambda g: (g[1][arms].nunique() if arms in g[1] else 0, len(g[1])))
    return best[1]


def setting(frame: pd.DataFrame) -> str:
    """The common setting in words, for a caption: model, quant, threads, attention, KV type."""
    if frame.empty:
        return ""
    row = frame.iloc[0]
    words = [str(row[k]) for k in ("model", "quant") if k in frame.columns]
    if "quant" in frame.columns and "model" in frame.columns and str(row["quant"]) in str(row["model"]):
        words = [str(row["model"])]
    if "threads" in frame.columns and pd.notna(row["threads"]):
        words.append(f"{int(row['threads'])} thread{'s' if int(row['threads']) != 1 else ''}")
    if "flash_attn" in frame.columns:
        words.append("flash attention" if bool(row["flash_attn"]) else "no flash attention")
    if "kv_type" in frame.columns:
        words.append(f"{row['kv_type']} KV cache")
    return ", ".join(words)
