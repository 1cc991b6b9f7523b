"""Price units: which of a run's timings a page quotes. Ratios hold within one unit only, so arms of two are never mixed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hiraishin.intervals import median_interval

if TYPE_CHECKING:
    from hiraishin.claims import Claim
    from hiraishin.report.facts import Book

UNSTEADY = 0.25
"""How far, as a share, the 95 % interval of the reference pass' median may reach; beyond, no ratio over it is evidence."""

_SETTING = ("quant", "threads", "context", "model", "settle", "env")


@dataclass(frozen=True)
class Priced:
    """One price unit with its claims by build and width."""

    result: Any
    claims: dict[tuple[str, int], Claim]

    @property
    def builds(self) -> list[str]:
        """The arms it timed, losers included."""
        return sorted({build for build, _ in self.claims}, key=lambda b: (b != "stock", b != "patched", b))

    @property
    def widths(self) -> list[int]:
        """The widths it timed."""
        return sorted({width for _, width in self.claims})

    @property
    def quant(self) -> str:
        """The weight type."""
        return str(self.result.inputs.get("quant") or "")

    @property
    def swing(self) -> float:
        """Interquartile range over median of the pass that everything is divided by."""
        record = self.result.record
        spread = (record.get("spread") or {}).get(record.get("base") or "stock") or {}
        return float(spread.get("1") or 0.0)

    @property
    def doubt(self) -> float:
        """How far the 95 % interval of that pass' median (:func:`~hiraishin.intervals.median_interval`) reaches, as a share.

        With fewer than six rounds there is no such interval: then all of its times count.
        """
        table, base = self.result.table, self.result.record.get("base") or "stock"
        times = [float(ms) for ms in table["ms"][(table["build"] == base) & (table["width"] == 1)]]
        low, high = median_interval(times) or (min(times), max(times))
        middle = statistics.median(times)
        return max(high / middle - 1, 1 - low / middle)

    @property
    def steady(self) -> bool:
        """Whether its ratios are evidence."""
        return self.doubt <= UNSTEADY


POST_QUANT = "Q4_K_M"
"""The weight type of the post's prices: of equally telling units the one like them is quoted."""


def priced(book: Book) -> list[Priced]:
    """A book's price units, the most telling first.

    That is: none of llama.cpp's own switches set, a large model (a pass that is all launch overhead says little about
    kernels; half the largest is large), the most arms, the post's weight type, the larger model, the most passes of
    settling, the shortest context.
    """
    if book.results is None:
        return []
    claims = book.find("price.ratio")
    found = []
    for result in book.results.of("price"):
        ratios = {(b, int(w)): v for b, by_width in result.record["ratio"].items() for w, v in by_width.items()}
        mine = {}
        for c in claims:
            at = (c.build, int(c.params["width"]))
            same = all(c.params.get(k) == result.inputs.get(k) for k in _SETTING if k in c.params)
            if same and c.value is not None and ratios.get(at) == c.value:
                mine[at] = c
        if mine:
            found.append(Priced(result, mine))

    largest = max((int(u.result.inputs.get("weight_bytes") or 0) for u in found), default=0)

    def rank(unit: Priced) -> tuple[Any, ...]:
        inputs = unit.result.inputs
        weight, settle = int(inputs.get("weight_bytes") or 0), int(inputs.get("settle") or 0)
        return (
            inputs.get("env") is not None,
            2 * weight < largest,
            -len(unit.builds),
            unit.quant != POST_QUANT,
            -weight,
            -settle,
            inputs.get("context") or 0,
            unit.result.key,
        )

    return sorted(found, key=rank)
