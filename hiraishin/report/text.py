"""Untrusted text (prompts, generated text, native logs) made fit to show: visible controls, cut, isolated."""

from __future__ import annotations

import re

from markupsafe import Markup

LONGEST_TEXT = 40_000
"""Characters of one output that a page shows; the rest is in the notebook file."""


def visible(text: str, limit: int = LONGEST_TEXT) -> str:
    """Text that a browser shows as it is: control characters as symbols, progress bars at their last state, cut."""
    text = "\n".join(line.removesuffix("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut here; {len(text) - limit:,} more characters are in the notebook file]"
    # C0 controls (but tab, newline and escape, which ANSI colours need) as their Unicode pictures.
    return re.sub(r"[\x00-\x08\x0b-\x1a\x1c-\x1f]", lambda m: chr(0x2400 + ord(m.group())), text)


def bdi(text: str, limit: int = 4000) -> Markup:
    """Untrusted text, escaped and isolated from the direction of what surrounds it, on as many lines as it has."""
    return Markup("<bdi>{}</bdi>").format(visible(text, limit).replace("\x1b", "␛"))
