"""Exact or not, margin stop or not, one recorded CUDA graph for each width or not: the same speculative runs under all eight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hiraishin.report.facts import format_number
from hiraishin.report.ladder import HUNT, left_out

if TYPE_CHECKING:
    from hiraishin.results import Result, ResultSet

GRAPHS = "cuda-graphs"
_ARITHMETIC = HUNT[0][2]
"""The parts of the patches that make arithmetic exact on a GPU."""

_BOTH = (False, True)
_SAME = ("matrix", "model", "quant", "draft_length", "tokens", "env", "threads", "kv_type", "flash_attn")


@dataclass(frozen=True)
class Cell:
    """The runs of one of the eight settings."""

    exact: bool
    margin: bool
    graphs: bool
    runs: Sequence[Result]

    @property
    def identical(self) -> Markup:
        """Runs whose text is that of plain decoding on the same arm."""
        return self._number("identical", sum(bool(r.record["identical"]) for r in self.runs))

    @property
    def count(self) -> Markup:
        """Runs, one a prompt."""
        return self._number("runs", len(self.runs))

    @property
    def acceptance(self) -> Markup:
        """Guesses kept, of those made."""
        drafted = sum(int(r.record["drafted"]) for r in self.runs)
        kept = sum(int(r.record["accepted"]) for r in self.runs)
        return self._number("acceptance", 100 * kept / drafted if drafted else None, "%")

    @property
    def speed(self) -> Markup:
        """Tokens a second, the median over prompts."""
        return self._median("tokens_per_second")

    @property
    def plain(self) -> Markup:
        """Tokens a second of plain decoding on the same arm, the median over prompts."""
        return self._median("plain_tokens_per_second")

    def _median(self, name: str) -> Markup:
        """Of the runs that have it: one that ended with its first token took no time."""
        values = [float(value) for r in self.runs if (value := r.record.get(name)) is not None]
        return self._number(name, statistics.median(values) if values else None)

    def _number(self, name: str, value: float | None, unit: str = "") -> Markup:
        return Markup('<data class="claim" value="{}" data-claim="grid.{}" data-result="{} results">{}</data>').format(
            "" if value is None else value, name, len(self.runs), format_number(value, unit)
        )


@dataclass(frozen=True)
class Grid:
    """Eight cells over the same prompts."""

    model: str
    draft: str
    cells: list[Cell]


def grids(results: ResultSet) -> list[Grid]:
    """Every complete grid: one draft with a margin and the same without, on arms for all four of exactness and graphs.

    Only prompts that all eight have count, so that speeds compare.
    """
    groups: dict[tuple[Any, ...], dict[tuple[bool, bool, bool], dict[str, Result]]] = {}
    for result in results.of("speculative"):
        arm, drafter = _arm(str(result.inputs.get("build"))), str(result.inputs.get("drafter"))
        draft, comma, stop = drafter.rpartition(", ")
        if arm is None or not comma or not (stop == "no margin" or stop.startswith("margin ")):
            continue
        if result.inputs.get("client_guard") or result.inputs.get("prefill") != "whole":
            continue
        key = (draft, *(result.inputs.get(name) for name in _SAME))
        cell = groups.setdefault(key, {}).setdefault((arm[0], stop != "no margin", arm[1]), {})
        cell.setdefault(str(result.inputs.get("prompt")), result)
    made = []
    for key, cells in groups.items():
        order = [(exact, margin, graphs) for exact in _BOTH for margin in _BOTH for graphs in _BOTH]
        shared = set.intersection(*(set(cells.get(place, {})) for place in order))
        if shared:
            runs = [Cell(*place, [cells[place][prompt] for prompt in sorted(shared)]) for place in order]
            made.append(Grid(f"{key[2]} {key[3]}", str(key[0]), runs))
    return made


def _arm(build: str) -> tuple[bool, bool] | None:
    """Whether an arm is exact, and whether it keeps a graph for each width; ``None`` for an arm that is neither wholly."""
    if build == "patched-off":
        return False, False
    left = left_out(build)
    if left is None:
        return None
    rest = left - {GRAPHS}
    if not rest:
        return True, GRAPHS not in left
    return (False, GRAPHS not in left) if rest >= _ARITHMETIC else None
