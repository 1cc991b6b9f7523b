"""The steps of an audit that run in the child process: replays, the noise floor, and watching operations.

On a GPU the operations are watched in a child of its own with CUDA fusion off. Watching runs every operation by itself, so
what the backend would fuse is not fused then, and rows change for that reason alone; a fused kernel cannot be looked
into. With fusion off from the start, watching changes nothing, and one replay there says whether the difference is there
without fusion too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hiraishin.errors import NativeCrash, UserError
from hiraishin.judge import share_limit, width_classes
from hiraishin.models import ModelFile
from hiraishin.worker import Event, Worker

if TYPE_CHECKING:
    from hiraishin.audit import AuditReport

Echo = Callable[[str], None]


def patient() -> dict[str, str]:
    """The environment of every child of an audit: threads that wait give way, unless the caller chose otherwise.

    On a busy machine a thread that spins at a barrier keeps the others from reaching it. Nothing is timed here, and no bit
    depends on how a thread waits.
    """
    return {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Job:
    """What every step of one audit shares. ``prompt`` holds token ids, ``tokens`` is the length of the trace."""

    model: ModelFile
    settings: dict[str, Any]
    switch: int
    prompt: list[int]
    tokens: int
    widths: tuple[int, ...]
    echo: Echo

    @property
    def on_gpu(self) -> bool:
        """Whether any layer runs on a GPU."""
        return bool(self.settings["gpu_layers"])

    def common(self) -> dict[str, Any]:
        """Arguments that the measuring functions have in common."""
        return {
            "model_path": str(self.model.path),
            "settings": self.settings,
            "switch": self.switch,
            "parts_off": 0,
            "prompt": self.prompt,
            "tokens": self.tokens,
        }


def replay(worker: Worker, job: Job, report: AuditReport) -> dict[str, Any]:
    """Replay width 1 and every width, twice each; fill in widths, classes and the controls of the replay.

    Returns:
        the trace's table.
    """
    hashes: dict[int, tuple[str, ...]] = {}
    trace: dict[str, Any] = {}
    for event in worker.call("hiraishin.replay:measure", **job.common(), widths=[1, *job.widths]):
        if event.get("kind") == "trace":
            trace = event["table"]
            hashes[1] = tuple(trace["row_sha256"])
        elif event.get("kind") == "replay" and event["width"] == 1:
            report.controls["width1_differing_rows"] = event["record"]["differing"]
            report.controls["width1_rerun_differing_rows"] = event["record"]["rerun_differing"]
        elif event.get("kind") == "replay":
            hashes[event["width"]] = tuple(event["table"]["row_sha256"])
            entry = _entry(event)
            report.widths.append(entry)
            job.echo(f"width {entry['width']:>2}: {entry['differing']} of {entry['positions']} rows differ")
    report.controls["rerun_differing_rows"] = sum(e["rerun_differing"] for e in report.widths)
    report.classes = width_classes(hashes)
    return trace


def _entry(event: Event) -> dict[str, Any]:
    record, table = event["record"], event["table"]
    names = ("positions", "differing", "first_differing", "first_differing_kv", "max_abs_diff", "flips")
    moved = [i for i, d in enumerate(table["differing"]) if d]
    rms = table["rms_diff"]
    return {
        **{name: record[name] for name in names},
        "width": event["width"],
        "rerun_differing": record["rerun_differing"],
        "rms": [rms[i] for i in moved],
        # None (not finite) is worse than any number.
        "worst": max(moved, key=lambda i: (rms[i] is None, rms[i] or 0), default=None),
        "flip_list": [[table["margin"][i], table["max_abs_diff"][i]] for i, f in enumerate(table["flip"]) if f],
    }


def measure_floor(worker: Worker, job: Job, tokens: list[int], report: AuditReport) -> None:
    """The first known reordering that moves anything here: no repack, then one thread, then attention the other way."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("weights not repacked", {"extra_bufts": False}),
        ("one thread", {"threads": 1}),
    ]
    if job.on_gpu:
        changes = []  # neither reaches a GPU
    if job.settings["kv_type"] in ("f16", "f32", "bf16"):
        flash = job.settings["flash_attn"]
        changes.append((f"flash attention {'off' if flash else 'on'}", {"flash_attn": not flash}))
    for name, change in changes:
        try:
            measured = worker.result(
                "hiraishin.replay:reorder_floor",
                model_path=str(job.model.path),
                settings=job.settings,
                changes=change,
                prompt=job.prompt,
                tokens=tokens[:64],
            )
        except NativeCrash:
            raise
        except UserError as error:
            job.echo(f"the noise floor by {name} cannot be measured: {error.what}")
            continue
        if measured["differing"]:
            report.floor = {"by": name, **measured}
            return
    report.floor = {"by": "", "differing": 0, "rms_max": 0.0}


def replay_unfused(worker: Worker, job: Job, report: AuditReport) -> None:
    """In a child without CUDA fusion: the widths that will be watched, so that fusion is told from what it hides."""
    widths = _targets(report, job)
    job.echo("replaying without CUDA fusion: operations are watched there, since a fused kernel cannot be looked into")
    for event in worker.call("hiraishin.replay:measure", **job.common(), widths=widths, rerun=False):
        if event.get("kind") == "replay":
            report.unfused.append(_entry(event))
            job.echo(f"width {event['width']:>2} without fusion: {event['record']['differing']} rows differ")


def _targets(report: AuditReport, job: Job) -> list[int]:
    """One width to watch of each class that differs; where none does, the widest: watching then finds nothing, too."""
    wrong = {e["width"] for e in report.widths if e["differing"]}
    found = [next((w for w in c if w in wrong), None) for c in report.classes]
    targets = list(dict.fromkeys(w for w in found if w is not None))
    return targets or list(job.widths[-1:])


def watch_operations(worker: Worker, job: Job, report: AuditReport) -> None:
    """Watch a pass of each target width: the first that differs, and the one whose rows move most."""
    replayed = report.unfused or report.widths
    wrong = {e["width"]: e for e in replayed if e["differing"]}
    report.controls["watching_changed_rows"] = None
    changed = 0
    for width in _targets(report, job):
        job.echo(f"watching the operations of a pass of {width} tokens")
        # The replay told where the first difference is; a narrow pass at the end of the trace cannot be watched.
        found = wrong[width]["first_differing"] // width * width if width in wrong else 0
        first = _watched(worker, job, width, found if found + width <= job.tokens else None)
        report.operations.append(first)
        changed += first["watching_changed_rows"]
        # Where the rows move most may be another pass, for another reason.
        worst = wrong[width]["worst"] // width * width if width in wrong else first["position"]
        if worst != first["position"] and worst + width <= job.tokens:
            again = _watched(worker, job, width, worst)
            first["worst_pass"] = again
            changed += again["watching_changed_rows"]
    report.controls["watching_changed_rows"] = changed


def _watched(worker: Worker, job: Job, width: int, start: int | None) -> dict[str, Any]:
    """One pass, watched: its first origin, how many there are, their kinds, and the largest relative size of one.

    The trace ends with the pass: what comes after is not looked at.
    """
    record: dict[str, Any] = {}
    arguments = job.common() | ({} if start is None else {"tokens": start + width})
    for event in worker.call("hiraishin.localize:measure", **arguments, width=width, start=start):
        if event.get("kind") == "localize":
            record = event["record"]
    origins = record["origins"]
    sized = [(o["relative"], share_limit(o)) for o in origins if o["relative"] is not None]
    worst = max(sized, key=lambda pair: pair[0] / pair[1], default=(None, None))
    kinds = sorted({(o["op"], o["weight_type"], o["switch"]) for o in origins})
    return {
        "width": width,
        "position": record["position"],
        "kv_position": record["kv_position"],
        "operations": record["operations"],
        "watching_changed_rows": record["watching_changed_rows"],
        "first": origins[0] if origins else None,
        "origins": len(origins),
        "largest_share": worst[0],
        "share_limit": worst[1],
        "kinds": [{"op": op, "weight_type": kind, "switch": switch} for op, kind, switch in kinds],
    }
