"""The replay's part of a story: the setting, what stock and patched rows did, the controls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from hiraishin.report.facts import Book, Fact
from hiraishin.report.words import settings_words


class ReplayStory:
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
