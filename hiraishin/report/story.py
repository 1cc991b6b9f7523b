"""What a run has to tell: the facts and tables that the article's sentences are chosen by.

Everything here is computed from a book's claims and results; a sentence of the article is printed only when the
facts it needs are there and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from hiraishin.report.facts import Fact
from hiraishin.report.story_speed import SpeedStory
from hiraishin.report.story_tables import TableStory
from hiraishin.report.words import number_word


@dataclass(frozen=True)
class Headline:
    """One of the large numbers under the short version."""

    fact: Markup | Fact
    label: str
    kind: str


class Story(SpeedStory, TableStory):
    """The facts of one book. Attributes are ``None`` (or empty) when the run does not hold what they need."""

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
