"""Settings, arms, ranges and single numbers, as the article writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hiraishin.report.facts import Fact, format_number

FORK_SHOWN = 260
"""Characters of a continuation that are shown after a fork."""

_INTERVAL = re.compile(r"95 % interval ([0-9.]+) to ([0-9.]+)")


def interval_ends(fact: Fact) -> tuple[float, float] | None:
    """The ends of the 95 % interval that a fact's claim states; ``None`` when it states none."""
    found = _INTERVAL.search(fact.claims[0].detail) if len(fact.claims) == 1 else None
    return (float(found[1]), float(found[2])) if found else None


def interval_of(fact: Fact) -> Markup | str:
    """That interval as an element, or nothing."""
    ends = interval_ends(fact)
    if ends is None:
        return ""
    return Markup(
        '<data class="claim" value="{0}" data-claim="{2}" data-param="interval">{0:.2f} to {1:.2f}</data>'
    ).format(*ends, fact.claims[0].id)


def arm_of(inputs: Mapping[str, Any]) -> str:
    """A build with the state of its switch, in words: the label that results carry, e.g. ``patched-without-guard``."""
    build = str(inputs.get("build", ""))
    return build.replace("patched-without-", "patched without ").replace("patched-", "patched, ")


def settings_words(inputs: Sequence[Mapping[str, Any]]) -> str:
    """Attention, KV type and threads in words, only those on which all the inputs agree."""

    def common(name: str) -> Any:
        values = {i.get(name) for i in inputs}
        return values.pop() if len(values) == 1 else None

    words = []
    flash = common("flash_attn")
    if flash is not None:
        words.append("flash attention" if flash else "no flash attention")
    if common("kv_type"):
        words.append(f"{common('kv_type')} KV")
    if common("threads"):
        words.append(f"{common('threads')} thread{'' if common('threads') == 1 else 's'}")
    return ", ".join(words)


def ranges(numbers: Sequence[int]) -> str:
    """``[2, 3, 4, 8, 9]`` as ``2–4, 8, 9``."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)


def cut_text(text: str) -> str:
    """A continuation, cut at a space."""
    return text if len(text) <= FORK_SHOWN else text[:FORK_SHOWN].rsplit(" ", 1)[0] + " …"


def sum_of(results: Sequence[Any], name: str, value: float | int) -> Markup:
    """A cell computed from several results, as an element that says so."""
    return Markup('<data class="claim" value="{}" data-claim="coverage.{}" data-result="{} results">{}</data>').format(
        value, name, len(results), format_number(value)
    )


def number_word(number: int | None) -> str:
    """A small number as a word."""
    words = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
    )
    return words[number] if number is not None and 0 <= number < len(words) else "many"


def fork_cell(runs: Sequence[Any]) -> Markup | str:
    """Where the runs of one cell fork; runs that agree are shown once."""
    if not runs:
        return ""
    shown: dict[Any, Markup | str] = {}
    for r in runs:
        byte = r.record.get("first_differing_byte")
        shown.setdefault(byte, "equal" if byte is None else result_number(r, "first_differing_byte"))
    return Markup(" / ").join(shown.values())


def result_number(result: Any, name: str, claim: str = "") -> Markup:
    """A number of one result's record, as an element that names the result and a claim (``speculative.NAME`` by default)."""
    value = result.record.get(name)
    text = (
        "" if value is None else (f"{value:.3g}" if isinstance(value, float) else f"{value:,}".replace(",", "\u202f"))
    )
    return Markup('<data class="claim" value="{}" data-claim="{}" data-result="{}">{}</data>').format(
        value, claim or f"speculative.{name}", result.key, text
    )
