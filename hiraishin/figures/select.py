"""Picking the rows a figure shows out of a sweep, the same way everywhere."""

from __future__ import annotations

import functools
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
    """A drafter's name in words: ``model Q4_0, margin 3`` is a ``draft model Q4_0, margin 3``."""
    for start, words in (("model", "draft model"), ("lookup", "prompt lookup"), ("replayed", "replayed trace")):
        if name == start or name.startswith((f"{start} ", f"{start},")):
            return words + name[len(start) :]
    return f"drafter {name}"


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


TRACE = ("prompt", "prompt_sha256", "prompt_tokens", "tokens")
"""Inputs that name a trace: replays of one trace belong into one panel."""
_ROWS = ("position", "kv_position", "margin", "differing", "max_abs_diff", "flip")


def replays(results: Any, **chosen: Any) -> Frame:
    """One row per build, trace, width and position of the stock and patched replays of one setting.

    Left out: width 1 (a control), replays with experimental overrides (``env``), and second replays of one trace. A
    stored replay without a differing row may carry no table; its rows are then made from its record, with the
    positions and margins of the trace that it replayed. ``chosen`` goes to :func:`one_setting`.
    """
    found = [
        r
        for r in results.of("replay")
        if not r.inputs.get("env") and r.inputs.get("build") in ARMS and int(r.inputs["width"]) > 1
    ]
    units: Frame = pd.DataFrame([{**_inputs(r), "at": i} for i, r in enumerate(found)])
    if units.empty:
        return units
    found = [found[i] for i in one_setting(units, results, **chosen)["at"]]
    places: dict[tuple[Any, ...], Frame] = {}
    for r in (*found, *results.of("trace")):
        if r.table is not None and len(r.table):
            places.setdefault(_trace(r), r.table)
    frames: dict[tuple[Any, ...], Frame] = {}
    for r in sorted(found, key=lambda r: (-int(r.record.get("positions") or 0), r.key)):
        if r.table is not None and len(r.table):
            rows: Frame = r.table[[c for c in _ROWS if c in r.table.columns]]
        elif r.record.get("differing") == 0 and _trace(r) in places:
            known = places[_trace(r)].iloc[: int(r.record["positions"])]
            rows = known[["position", "kv_position", "margin"]].assign(differing=False, max_abs_diff=0.0, flip=False)
        else:
            continue
        start = int(rows["kv_position"].iloc[0])
        # The longest replay of a trace stands for shorter ones from the same place.
        which = (r.inputs.get("build"), r.inputs.get("prompt_sha256"), start, r.inputs.get("width"))
        if which not in frames:
            frames[which] = rows.assign(**_inputs(r), start=start)
    return pd.concat(list(frames.values()), ignore_index=True) if frames else pd.DataFrame()


def _inputs(result: Any) -> dict[str, Any]:
    return {k: result.inputs.get(k) for k in (*SETTINGS, "prompt", "build", "width")}


def _trace(result: Any) -> tuple[Any, ...]:
    return tuple(result.inputs.get(k) for k in (*TRACE, "model_sha256", *SETTINGS))


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
