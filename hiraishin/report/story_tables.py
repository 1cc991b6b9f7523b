"""The story's tables: origins, weight types, the ladder, the replay's coverage, the article's own claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hiraishin.report.hunt import hunted
from hiraishin.report.ladder import Ladder, ladders
from hiraishin.report.story_replay import ReplayStory
from hiraishin.report.words import arm_of, ranges, result_number, settings_words, sum_of

SUMMARY = (
    ("replay.first_differing_width", ("stock", "patched"), "min"),
    ("replay.positions_compared", ("stock", "patched"), "sum"),
    ("replay.differing_positions", ("stock", "patched"), "sum"),
    ("replay.max_abs_diff", ("stock", "patched"), "max"),
    ("replay.flips", ("stock", "patched"), "sum"),
    ("reference.differing_rows", ("patched",), "sum"),
    ("switch_off.differing_rows", ("patched",), "sum"),
    ("control.rerun_differing_rows", ("stock", "patched"), "sum"),
    ("control.width1_differing_rows", ("stock", "patched"), "sum"),
    ("evaluate.prompts", ("stock", "patched"), "max"),
    ("evaluate.identical", ("stock", "patched"), "min"),
    ("matrix24.runs", ("stock", "patched"), "sum"),
    ("matrix24.identical", ("stock", "patched"), "sum"),
    ("matrix208.runs", ("stock", "patched"), "sum"),
    ("matrix208.identical", ("stock", "patched"), "sum"),
)
"""Claims of the article's own table: id, builds, and how claims over several parameters become one number."""


class TableStory(ReplayStory):
    """The tables of one book."""

    # Tables ---------------------------------------------------------------------------------------------------

    @cached_property
    def origins(self) -> list[dict[str, Any]]:
        """First origin by weight type and width, from the localizer's results on stock."""
        rows = []
        results = self.book.results.of("localize", build="stock") if self.book.results else []
        for r in sorted(
            results,
            key=lambda r: (str(r.inputs.get("quant")), int(r.record.get("width") or r.inputs.get("width") or 0)),
        ):
            origins = r.record.get("origins") or []
            if not isinstance(origins, Sequence) or not origins:
                continue
            first = origins[0] if isinstance(origins[0], Mapping) else {"tensor": str(origins[0])}
            rows.append(
                {
                    "quant": r.inputs.get("quant", ""),
                    "width": r.record.get("width") or r.inputs.get("width"),
                    "tensor": first.get("tensor") or first.get("name") or "",
                    "op": first.get("op", ""),
                    "switch": first.get("switch") or "",
                }
            )
        return rows

    @cached_property
    def first_origin(self) -> dict[str, Any] | None:
        """The first operation that differs at the smallest localized width, for the headline's weight type."""
        rows = [o for o in self.origins if o["quant"] == self.quant] or self.origins
        return min(rows, key=lambda o: int(o["width"] or 0)) if rows else None

    @cached_property
    def hunt(self) -> list[dict[str, Any]]:
        """One pass watched with one cause treated after the other: what is treated, how many operations start a difference,
        and the first of them; empty unless the steps lead from something untreated to the next. Of several such passes the
        first is told."""
        steps = hunted(self.book.results) if self.book.results else []
        rows = []
        for step in steps:
            made = step.result
            origins = made.record.get("origins") or []
            origin = origins[0] if origins and isinstance(origins[0], Mapping) else {}
            wanted: dict[str, Any] = {k: made.inputs.get(k) for k in ("width", "prompt", "quant", "threads")}
            rows.append(
                {
                    "treated": ", ".join(step.treated) or "none",
                    "origins": self.book.fact("localize.origins", str(made.inputs["build"]), "max", **wanted),
                    "operation": origin.get("op", ""),
                    "tensor": origin.get("tensor", ""),
                    "switch": origin.get("switch") or "",
                    "width": result_number(made, "width", "localize.origins"),
                    "prompt": made.inputs["prompt"],
                    "kv": result_number(made, "kv_position", "localize.origins"),
                }
            )
        return rows if len(rows) > 1 else []

    @cached_property
    def patched_widths(self) -> str:
        """The widths at which the patched build was replayed, in words."""
        results = self.book.results.of("replay", build="patched") if self.book.results else []
        mine = [r for r in results if r.inputs.get("quant") == self.quant and int(r.inputs.get("width") or 0) > 1]
        return ranges(sorted({int(r.inputs["width"]) for r in mine}))

    @cached_property
    def weight_types(self) -> list[dict[str, Any]]:
        """Where stock differs first, by weight type, and what is left on the patched build; needs two types or more."""
        quants = sorted(
            {
                str(c.params["quant"])
                for c in self.book.find("replay.first_differing_width", "stock")
                if "quant" in c.params
            }
        )
        rows = []
        for quant in sorted(quants, key=lambda q: (q != self.quant, q)):
            rows.append(
                {
                    "quant": quant,
                    "short": self.book.fact("replay.first_differing_width_short", "stock", "min", quant=quant),
                    "width": self.book.fact("replay.first_differing_width", "stock", "min", quant=quant),
                    "largest": self.book.fact("replay.max_abs_diff", "stock", "max", quant=quant),
                    "flips": self.book.fact("replay.flips", "stock", "sum", quant=quant),
                    "left": self.book.fact("replay.differing_positions", "patched", "sum", quant=quant),
                    "compared": self.book.fact("replay.positions_compared", "patched", "sum", quant=quant),
                }
            )
        return rows if len(rows) > 1 else []

    @cached_property
    def ladders(self) -> list[Ladder]:
        """The hunt's causes treated one after the other (see :mod:`hiraishin.report.ladder`)."""
        return ladders(self.book.results) if self.book.results else []

    @cached_property
    def coverage(self) -> list[dict[str, Any]]:
        """The replay table: one row a build, weight type and setting, summed over prompts and widths."""
        if self.book.results is None:
            return []
        groups: dict[tuple[str, ...], list[Any]] = {}
        for r in self.book.results.of("replay"):
            if int(r.inputs.get("width") or 0) < 2:
                continue
            key = (str(r.inputs.get("quant", "")), arm_of(r.inputs), settings_words([r.inputs]))
            groups.setdefault(key, []).append(r)
        order = {"stock": 0, "patched": 1, "patched, off": 2, "patched, serial": 3}
        rows = []
        for (quant, arm, settings), results in sorted(
            groups.items(), key=lambda g: (g[0][0] != self.quant, g[0][0], g[0][2], order.get(g[0][1], 9))
        ):
            widths = sorted({int(r.inputs["width"]) for r in results})
            contexts = [
                int(r.table["kv_position"].max()) + 1
                for r in results
                if r.table is not None and len(r.table) and "kv_position" in r.table
            ]
            changes = [r.record.get("max_abs_diff") for r in results if r.record.get("max_abs_diff") is not None]
            rows.append(
                {
                    "arm": arm,
                    "quant": quant,
                    "settings": settings,
                    "widths": ranges(widths),
                    "context": sum_of(results, "context", max(contexts)) if contexts else "",
                    "compared": sum_of(results, "compared", sum(int(r.record.get("positions") or 0) for r in results)),
                    "differing": sum_of(
                        results, "differing", sum(int(r.record.get("differing") or 0) for r in results)
                    ),
                    "largest": sum_of(results, "largest", max(changes)) if changes else "",
                    "flips": sum_of(results, "flips", sum(int(r.record.get("flips") or 0) for r in results)),
                }
            )
        return rows

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """The article's own claims table."""
        rows = []
        for id, builds, how in SUMMARY:
            for build in builds:
                fact = self._fact(id, build, how)
                if fact is not None:
                    over = f"{how} of {len(fact.claims)}" if len(fact.claims) > 1 else ""
                    rows.append({"id": id, "build": build, "fact": fact, "over": over})
        return rows
