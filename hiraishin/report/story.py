"""What a run has to tell: the facts and tables that the article's sentences are chosen by.

Everything here is computed from a book's claims and results; a sentence of the article is printed only when the
facts it needs are there and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup

from hiraishin.report.facts import Book, Fact, ratio
from hiraishin.report.ladder import Ladder, ladders
from hiraishin.report.prices import Priced, priced
from hiraishin.report.text import bdi
from hiraishin.report.words import (
    arm_of,
    cut_text,
    fork_cell,
    interval_ends,
    interval_of,
    number_word,
    ranges,
    result_number,
    settings_words,
    sum_of,
)

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

_COMMON_TAIL = 160
"""Characters of common text shown before a fork."""


@dataclass(frozen=True)
class Headline:
    """One of the large numbers under the short version."""

    fact: Markup | Fact
    label: str
    kind: str


class Story:
    """The facts of one book. Attributes are ``None`` (or empty) when the run does not hold what they need."""

    def __init__(self, book: Book) -> None:
        self.book = book

    # The setting ----------------------------------------------------------------------------------------------

    @cached_property
    def quant(self) -> str | None:
        """The weight type that the headline numbers are about: the profile's, or the one measured most."""
        profile = self.book.results.profile if self.book.results else None
        quant = getattr(getattr(profile, "model", None), "quant", None)
        with_quant = [c for c in self.book.claims if "quant" in c.params]
        found: dict[str, int] = {}
        for claim in [c for c in with_quant if c.id.startswith("replay.")] or with_quant:
            found[str(claim.params["quant"])] = found.get(str(claim.params["quant"]), 0) + 1
        if quant in found or not found:
            return quant
        return max(sorted(found), key=lambda q: found[q])

    @cached_property
    def _replay_inputs(self) -> Mapping[str, Any]:
        for kind in ("replay", "trace", "price", "plain", "speculative"):
            results = self.book.results.of(kind) if self.book.results else []
            best = [r for r in results if r.inputs.get("quant") == self.quant] or results
            if best:
                return best[0].inputs
        return {}

    @cached_property
    def model_name(self) -> str:
        """The model, without its weight type."""
        return str(self._replay_inputs.get("model") or "")

    @cached_property
    def model(self) -> str:
        """Model and weight type in words."""
        name = str(self._replay_inputs.get("model") or "")
        quant = self.quant or ""
        return name if not quant or quant.lower() in name.lower() else f"{name} {quant}".strip()

    @cached_property
    def settings(self) -> str:
        """Threads, attention and KV type in words; only what is the same for every replay of the headline type."""
        results = self.book.results.of("replay") if self.book.results else []
        mine = [r.inputs for r in results if r.inputs.get("quant") == self.quant]
        return settings_words(mine) if mine else ""

    @cached_property
    def synthetic(self) -> bool:
        """Whether the weights are random (a synthetic shape)."""
        return bool(self._replay_inputs.get("synthetic"))

    def _fact(self, id: str, build: str | None = None, how: str = "", **params: Any) -> Fact | None:
        if self.quant and any("quant" in c.params for c in self.book.find(id, build)):
            params.setdefault("quant", self.quant)
        return self.book.fact(id, build, how, **params)

    # The replay -----------------------------------------------------------------------------------------------

    @cached_property
    def stock_compared(self) -> Fact | None:
        """Rows compared on the stock build."""
        return self._fact("replay.positions_compared", "stock", "sum")

    @cached_property
    def stock_differing(self) -> Fact | None:
        """Rows of those that differ."""
        return self._fact("replay.differing_positions", "stock", "sum")

    @cached_property
    def stock_differs(self) -> bool:
        """Whether the stock build was measured and differs somewhere."""
        return self.first_width is not None and bool(self.stock_differing and self.stock_differing.value)

    @cached_property
    def stock_exact(self) -> bool:
        """Whether the stock build was measured and never differs."""
        compared, differing = self.stock_compared, self.stock_differing
        return bool(compared and compared.value and differing and differing.value == 0)

    @cached_property
    def first_width(self) -> Fact | None:
        """The smallest width at which a stock row differs; ``None`` when there is none."""
        fact = self._fact("replay.first_differing_width", "stock", "min")
        return fact if fact and fact.value is not None else None

    @cached_property
    def stock_max(self) -> Fact | None:
        """Largest change of one logit, stock."""
        fact = self._fact("replay.max_abs_diff", "stock", "max")
        return fact if fact and fact.value is not None else None

    @cached_property
    def stock_flips(self) -> Fact | None:
        """Rows whose argmax changed, stock."""
        return self._fact("replay.flips", "stock", "sum")

    @cached_property
    def first_position(self) -> Fact | None:
        """The smallest KV position that differs on stock."""
        fact = self._fact("replay.first_differing_kv", "stock", "min")
        return fact if fact and fact.value is not None else None

    @cached_property
    def first_width_short(self) -> Fact | None:
        """The same over the rows before the attended range is split (short contexts)."""
        fact = self._fact("replay.first_differing_width_short", "stock", "min")
        return fact if fact and fact.value is not None else None

    @cached_property
    def waits(self) -> bool:
        """Whether a longer context makes stock differ at a smaller width than a short one does."""
        short, overall = self.first_width_short, self.first_width
        return bool(short and overall and short.value and overall.value and short.value > overall.value)

    @cached_property
    def flip_margins(self) -> tuple[Fact, Fact] | None:
        """Smallest and largest margin at a flip on stock."""
        low = self._fact("replay.smallest_flip_margin", "stock", "min")
        high = self._fact("replay.largest_flip_margin", "stock", "max")
        return (low, high) if low is not None and high is not None else None

    @cached_property
    def patched_compared(self) -> Fact | None:
        """Rows compared on the patched build."""
        return self._fact("replay.positions_compared", "patched", "sum")

    @cached_property
    def patched_differing(self) -> Fact | None:
        """Rows of those that differ."""
        return self._fact("replay.differing_positions", "patched", "sum")

    @cached_property
    def patched_max(self) -> Fact | None:
        """Largest change of one logit, patched."""
        return self._fact("replay.max_abs_diff", "patched", "max")

    @cached_property
    def patched_first_width(self) -> Fact | None:
        """The smallest width at which a patched row differs."""
        return self._fact("replay.first_differing_width", "patched", "min")

    @cached_property
    def patched_exact(self) -> bool:
        """Whether the patched build was measured and never differs."""
        compared, differing = self.patched_compared, self.patched_differing
        return bool(compared and compared.value and differing and differing.value == 0)

    @cached_property
    def patched_differs(self) -> bool:
        """Whether the patched build was measured and differs somewhere."""
        return bool(self.patched_differing and self.patched_differing.value)

    @cached_property
    def reference_differing(self) -> Fact | None:
        """Rows of the patched build's lone token that differ from stock's."""
        return self.book.fact("reference.differing_rows", None, "sum")

    @cached_property
    def reference_unmoved(self) -> bool:
        """Whether that was measured and is none."""
        return bool(self.reference_differing and self.reference_differing.value == 0)

    @cached_property
    def switch_off_differing(self) -> Fact | None:
        """Rows that differ from stock with the switch off."""
        return self.book.fact("switch_off.differing_rows", None, "sum")

    @cached_property
    def controls_clean(self) -> bool:
        """Whether both controls were measured and found nothing."""
        controls = [self.book.fact(f"control.{c}_differing_rows", None, "sum") for c in ("rerun", "width1")]
        return all(c is not None and c.value == 0 for c in controls)

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

    # The top of the page --------------------------------------------------------------------------------------

    @cached_property
    def headline(self) -> str:
        """The title; it claims only what was measured."""
        if self.stock_exact:
            return "Here a token keeps its logits in any company"
        if self.stock_differs:
            return "The logits a token gets depend on its company"
        return "Does a token’s company change its logits?"

    @cached_property
    def numbers(self) -> list[Headline]:
        """The large numbers under the short version."""
        found: list[Headline] = []
        if self.first_width is not None and self.stock_differs:
            if self.waits and self.first_width_short is not None:
                words = "tokens in a pass over a short context, and stock gives other bits"
                found.append(Headline(self.first_width_short, words, "stock"))
            else:
                found.append(Headline(self.first_width, "tokens in a pass, and stock gives other bits", "stock"))
        if self.stock_max and self.stock_differs:
            found.append(Headline(self.stock_max.plain(), "largest change of one logit on stock", "stock"))
        if self.patched_differing is not None:
            found.append(Headline(self.patched_differing, "differing rows with the patches", "exact"))
        if self.price_wide:
            found.append(
                Headline(
                    self.price_wide["patched"].times(),
                    f"the price of an exact pass of {number_word(self._wide_width)} tokens",
                    "exact",
                )
            )
        return found
