"""Tables that notebooks show: builds, patches, loaded libraries, claims. Small, pure but for reading the project's files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pandas as pd

from hiraishin import paths
from hiraishin.errors import UserError

if TYPE_CHECKING:
    from hiraishin.builds import Build
    from hiraishin.results import ResultSet

# What pandas cuts off is what tells two rows apart.
pd.set_option("display.max_colwidth", None, "display.max_rows", 400)


def builds_table(builds: Iterable[Build]) -> pd.DataFrame:
    """One row a build: its name, what it was made from and with, and its fingerprint."""
    rows = []
    for build in builds:
        about = build.description
        cpu = about.get("cpu") or {}
        rows.append(
            {
                "build": build.name,
                "backend": build.backend,
                "upstream commit": about.get("upstream_commit"),
                "patches": len(about.get("patches") or []),
                "compiler": (about.get("compiler") or {}).get("c++"),
                "processor or GPU": about.get("gpu_arch") or " ".join(cpu.get("features") or []),
                "fingerprint": build.fingerprint[:16],
            }
        )
    return pd.DataFrame(rows).set_index("build")


def patches_table() -> pd.DataFrame:
    """The series in its order: each patch with its first paragraph and the lines it adds and takes away.

    Raises:
        UserError: the series names a patch that is not there.
    """
    folder = paths.ROOT / "patches"
    rows = []
    for name in (folder / "series").read_text(encoding="utf-8").split():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"patches/series names {name}, which is not there", "Restore it with git.") from error
        head, _, body = text.partition("\n--- ")
        lines = body.splitlines()
        rows.append(
            {
                "patch": name,
                "what it does": " ".join(re.split(r"\n\s*\n", head.strip())[0].split()),
                "lines added": sum(line.startswith("+") and not line.startswith("+++") for line in lines),
                "lines removed": sum(line.startswith("-") and not line.startswith("---") for line in lines),
            }
        )
    return pd.DataFrame(rows).set_index("patch")


def libraries_table(builds: Iterable[Build]) -> pd.DataFrame:
    """What a child process of each build really loads: library by library, the start of its sha256.

    Equal hashes in a row mean that the builds share that library; a comparison needs another ``libggml-cpu`` (or
    ``libggml-cuda``) on each side.

    Raises:
        UserError: a library cannot be loaded or has another layout than the Python side expects.
    """
    from hiraishin.worker import Worker

    columns = {}
    for build in builds:
        with Worker(build) as worker:
            columns[build.name] = {name: digest[:16] for name, digest in sorted(worker.libraries.items())}
    return pd.DataFrame(columns).rename_axis("library")


def claims_table(results: ResultSet, *ids: str) -> pd.DataFrame:
    """Claims whose id starts with one of ``ids`` (all without any): id, build, parameters, value, unit."""
    from hiraishin.claims import claims
    from hiraishin.report.article import params_words

    rows = [
        {
            "claim": c.id,
            "build": c.build,
            "of what": params_words(c.params),
            "value": c.value,
            "unit": c.unit,
        }
        for c in claims(results)
        if not ids or c.id.startswith(ids)
    ]
    return pd.DataFrame(rows, columns=["claim", "build", "of what", "value", "unit"], dtype=object)


def watching_table(results: ResultSet) -> pd.DataFrame:
    """One row a localized pass: where it was, how many operations ran and differ, and what watching changed."""
    rows = [
        {
            "build": r.unit.inputs["build"],
            "quant": r.unit.inputs["quant"],
            "width": r.record["width"],
            "KV position": r.record["kv_position"],
            "operations": r.record["operations"],
            "that differ": r.record["differing_operations"],
            "logit rows that differ": r.record["differing_rows"],
            "rows that watching changed": r.record["watching_changed_rows"],
        }
        for r in results.of("localize")
    ]
    return pd.DataFrame(rows)


def hunt_table(results: ResultSet) -> pd.DataFrame:
    """One row a step of the hunt: the causes treated so far, what starts a difference then, and how many operations do."""
    from hiraishin.report.hunt import hunted

    rows = []
    for step in hunted(results):
        origins = step.result.record["origins"]
        kinds = dict.fromkeys(f"{o['op']} {o['weight_type']} ({o['switch']})" for o in origins)
        rows.append(
            {
                "treated": ", ".join(step.treated) or "none",
                "operations that start a difference": len(origins),
                "the first": origins[0]["tensor"] if origins else "",
                "of which kinds": "; ".join(kinds),
                "logit rows that differ": step.result.record["differing_rows"],
            }
        )
    return pd.DataFrame(rows)


def origins_table(results: ResultSet) -> pd.DataFrame:
    """One row a kind of origin: build, quant, width, operation, weight type, switch, how many, the first, the largest share."""
    rows = [
        {
            "build": r.unit.inputs["build"],
            "quant": r.unit.inputs["quant"],
            "width": r.record["width"],
            "operation": origin["op"],
            "weights": origin["weight_type"],
            "switch": origin["switch"],
            "tensor": origin["tensor"],
            "share": origin.get("relative"),
        }
        for r in results.of("localize")
        for origin in r.record["origins"]
    ]
    keys = ["build", "quant", "width", "operation", "weights", "switch"]
    if not rows:
        return pd.DataFrame(columns=[*keys, "origins", "first", "largest share"])
    grouped = pd.DataFrame(rows).groupby(keys, sort=False)
    named = {"origins": ("tensor", "size"), "first": ("tensor", "first"), "largest share": ("share", "max")}
    return grouped.agg(**named).reset_index()
