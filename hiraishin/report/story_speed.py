"""The story's parts about cost: the price of a pass, and speculative decoding."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from markupsafe import Markup

from hiraishin.report.facts import Fact, ratio
from hiraishin.report.prices import Priced, priced
from hiraishin.report.story_replay import ReplayStory
from hiraishin.report.text import bdi
from hiraishin.report.words import arm_of, cut_text, fork_cell, interval_ends, interval_of, result_number, sum_of

_COMMON_TAIL = 160
"""Characters of common text shown before a fork."""


class SpeedStory(ReplayStory):
    """Price and speculation of one book."""

    # Price ----------------------------------------------------------------------------------------------------

    @cached_property
    def _priced(self) -> list[Priced]:
        """One price unit a weight type, the headline's type first; experiments with llama.cpp's own switches left out."""
        by_quant: dict[str, Priced] = {}
        for unit in priced(self.book):
            if not unit.result.inputs.get("env"):
                by_quant.setdefault(unit.quant, unit)
        return sorted(by_quant.values(), key=lambda u: (u.quant != self.quant, u.quant))

    @cached_property
    def _headline_price(self) -> Priced | None:
        """The unit of the headline's weight type, or the only one there is."""
        mine = [u for u in self._priced if u.quant == self.quant] or self._priced
        return mine[0] if mine else None

    @cached_property
    def price_unsteady(self) -> Markup | None:
        """The spread of the reference pass in percent, when it is too wide to quote ratios over it; else ``None``."""
        unit = self._headline_price
        if unit is None or unit.steady:
            return None
        return Markup('<data class="claim" value="{}" data-claim="price.ratio" data-result="{}">{:.0f}%</data>').format(
            unit.swing, unit.result.key, 100 * unit.swing
        )

    @cached_property
    def price_width(self) -> Markup:
        """The width that the short version prices, as an element."""
        return Markup('<data class="claim" value="{0}" data-claim="price.ratio" data-param="width">{0}</data>').format(
            self._wide_width or ""
        )

    @cached_property
    def _wide_width(self) -> int | None:
        unit = self._headline_price
        widths = [w for b, w in unit.claims if b == "patched"] if unit else []
        # The post's nine if it was measured, else the widest.
        return 9 if 9 in widths else max(widths, default=None)

    @cached_property
    def price_wide(self) -> dict[str, Fact] | None:
        """The price at that width by build, or ``None`` where it was not measured, or not steadily."""
        unit, width = self._headline_price, self._wide_width
        if unit is None or width is None or not unit.steady:
            return None
        return {b: Fact(c.value, "x", (c,)) for (b, w), c in unit.claims.items() if w == width}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights behind the headline's price."""
        unit = self._headline_price
        return int(unit.result.inputs.get("weight_bytes") or 0) if unit else 0

    @cached_property
    def price_variants(self) -> list[tuple[str, Fact]]:
        """Exact kernels left out or swapped, at that width: name and price."""
        wide = self.price_wide or {}
        return [(arm_of({"build": b}), f) for b, f in sorted(wide.items()) if b not in ("stock", "patched")]

    @cached_property
    def prices(self) -> dict[str, Any] | None:
        """The price table: widths, and a row for each weight type and arm; ``unsteady`` names types that are no evidence."""
        units = self._priced
        if not units:
            return None
        widths = sorted({w for u in units for w in u.widths})
        if len(widths) > 9:
            widths = [w for w in widths if w in (1, 2, 3, 4, 5, 8, 9, 12, 16)]
        rows = []
        for unit in sorted(units, key=lambda u: u.quant):
            for build in unit.builds:
                cells = [unit.claims.get((build, w)) for w in widths]
                rows.append(
                    {
                        "build": arm_of({"build": build}),
                        "quant": unit.quant,
                        "steady": unit.steady,
                        "cells": [Fact(c.value, "x", (c,)).times() if c else None for c in cells],
                    }
                )
        return {"widths": widths, "rows": rows, "unsteady": [u.quant for u in units if not u.steady]}

    # Speculation ----------------------------------------------------------------------------------------------

    @cached_property
    def forks(self) -> dict[str, Any] | None:
        """Stock runs of the 24-run matrix: how many, how many identical, how many not, and how often each was made."""
        runs = self.book.fact("matrix24.runs", "stock", "sum")
        same = self.book.fact("matrix24.identical", "stock", "sum")
        if runs is None or same is None or runs.value is None or same.value is None:
            return None
        results = self._matrix("stock")
        places = {(r.inputs.get("prompt"), r.inputs.get("draft_length")) for r in results}
        return {
            "runs": runs,
            "identical": same,
            "forked": Fact(runs.value - same.value, "", runs.claims + same.claims, "difference"),
            "settings": sum_of(results, "settings", len(places)),
            "repeated": len(results) > len(places),
            "left": self.book.fact("matrix24.identical", "patched", "sum"),
            "of": self.book.fact("matrix24.runs", "patched", "sum"),
        }

    def _matrix(self, build: str) -> list[Any]:
        results = self.book.results.of("speculative", build=build, matrix="matrix24") if self.book.results else []
        return [r for r in results if r.record.get("identical") is not None]

    @cached_property
    def matrix(self) -> dict[str, Any] | None:
        """The 24-run matrix on stock: a row for each prompt, a column for each draft length, where each run forks."""
        cells: dict[str, dict[int, list[Any]]] = {}
        for r in self._matrix("stock"):
            if r.inputs.get("draft_length") is not None:
                cells.setdefault(str(r.inputs.get("prompt")), {}).setdefault(int(r.inputs["draft_length"]), []).append(
                    r
                )
        if not cells:
            return None
        lengths = sorted({n for row in cells.values() for n in row})
        return {
            "lengths": lengths,
            "rows": [
                {"prompt": prompt, "cells": [fork_cell(row.get(n, [])) for n in lengths]}
                for prompt, row in sorted(cells.items())
            ],
        }

    @cached_property
    def exhibit(self) -> dict[str, Any] | None:
        """One stock run that left the text of plain decoding: both continuations around the fork, escaped."""
        results = self.book.results.of("speculative", build="stock", prefill="whole") if self.book.results else []
        forked = [
            r
            for r in results
            if r.record.get("identical") is False
            and isinstance(r.record.get("text"), str)
            and isinstance(r.record.get("plain_text"), str)
        ]
        if not forked:
            return None
        # The earliest fork that leaves words to read on both sides.
        result = min(
            forked,
            key=lambda r: (
                int(r.record.get("first_differing_byte") or 0) < 40,
                int(r.record.get("first_differing_byte") or 0),
                r.key,
            ),
        )
        plain, other = str(result.record["plain_text"]), str(result.record["text"])
        split = next(
            (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other))
        )
        common = plain[max(0, split - _COMMON_TAIL) : split]
        margin = result.record.get("margin_there")
        return {
            "prompt": str(result.inputs.get("prompt", "")),
            "common": bdi(("…" if split > _COMMON_TAIL else "") + common),
            "plain": bdi(cut_text(plain[split:])),
            "speculative": bdi(cut_text(other[split:])),
            "byte": result_number(result, "first_differing_byte"),
            "margin": result_number(result, "margin_there") if margin is not None else None,
        }

    @cached_property
    def evaluation(self) -> list[dict[str, Any]]:
        """The evaluation by drafter on the patched build, largest first: prompts, identical, and the same on stock."""
        rows = []
        for claim in sorted(self.book.find("evaluate.prompts", "patched"), key=lambda c: -(c.value or 0)):
            same = self.book.fact("evaluate.identical", "patched", "min", **claim.params)
            stock = self.book.fact("evaluate.identical", "stock", "min", **claim.params)
            if same is not None and claim.value:
                rows.append(
                    {
                        "drafter": str(claim.params.get("drafter") or "the default drafter"),
                        "prompts": Fact(claim.value, claim.unit, (claim,)),
                        "identical": same,
                        "stock": stock,
                        "all": same.value == claim.value,
                    }
                )
        return rows

    @cached_property
    def speeds(self) -> list[dict[str, Any]]:
        """Exactness, acceptance and speed by drafter and build, for every evaluation.

        The gain is the median over runs, each against plain decoding of its own prompt in the same process: two medians of
        different hours would compare the machine with itself.
        """
        rows = []
        found = [
            c
            for c in self.book.find("speculative.tokens_per_second")
            if c.value is not None and str(c.params.get("matrix", "evaluation")).startswith("evaluation")
        ]
        for c in sorted(
            found, key=lambda c: (str(c.params.get("matrix")), str(c.params.get("drafter")), c.build != "stock")
        ):
            identical = self.book.fact("evaluate.identical", c.build, "min", **c.params)
            prompts = self.book.fact("evaluate.prompts", c.build, "max", **c.params)
            acceptance = self.book.fact("speculative.acceptance", c.build, "max", **c.params)
            cycle = self.book.fact("speculative.tokens_per_cycle", c.build, "max", **c.params)
            gain = self._gain(c)
            rows.append(
                {
                    "build": c.build,
                    "drafter": str(c.params.get("drafter") or "default"),
                    "identical": Markup("{} of {}").format(identical, prompts) if identical and prompts else "",
                    "acceptance": acceptance.percent(1) if acceptance and acceptance.value is not None else "",
                    "tokens": cycle if cycle is not None else "",
                    "speculative": Fact(c.value, c.unit, (c,)).plain(),
                    "ratio": gain.times() if gain else "",
                    "interval": interval_of(gain) if gain else "",
                }
            )
        return rows

    def _gain(self, speed: Any) -> Fact | None:
        """Speculative over plain speed for one claim's build and parameters: paired by run where runs knew their plain speed."""
        paired = self.book.fact("speculative.speedup", speed.build, "max", **speed.params)
        if paired is not None and paired.value is not None:
            return Fact(paired.value, "x", paired.claims)
        plain = self.book.fact("plain.tokens_per_second", speed.build, "max")
        return ratio(Fact(speed.value, speed.unit, (speed,)), plain) if plain else None

    @cached_property
    def best_gain(self) -> dict[str, Any] | None:
        """Exact speculation over plain decoding, where it is best: the ratio, its drafter, and whether it clearly pays."""
        gains = [
            (gain, str(c.params.get("drafter")))
            for c in self.book.find("speculative.tokens_per_second", "patched")
            if c.value is not None and str(c.params.get("matrix", "")).startswith("evaluation")
            for gain in [self._gain(c)]
            if gain is not None and gain.value is not None
        ]
        if not gains:
            return None
        gain, drafter = max(gains, key=lambda g: g[0].value or 0.0)
        ends = interval_ends(gain)
        low, high = ends if ends else (gain.value or 0.0, gain.value or 0.0)
        return {
            "gain": gain,
            "drafter": drafter,
            "interval": interval_of(gain),
            "pays": low > 1,
            "loses": high < 1,
        }
