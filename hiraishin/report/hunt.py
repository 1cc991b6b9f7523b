"""The hunt on one watched pass: one cause treated after the other, and what then starts a difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hiraishin.results import Result, ResultSet

WITHOUT = "patched-without-"


@dataclass(frozen=True)
class Step:
    """A watched pass with some of the hunt's causes treated; ``treated`` names them in the order in which they were."""

    treated: tuple[str, ...]
    result: Result


def hunted(results: ResultSet) -> list[Step]:
    """The steps of the first pass that was watched on several arms of the patched build, each leaving fewer causes out.

    Arms are named by what they leave out (``patched-without-a+b``), so that a step treats what the arms before it left out and
    it does not.
    """
    passes: dict[tuple[Any, ...], list[tuple[frozenset[str], Result]]] = {}
    for result in results.of("localize"):
        build = str(result.inputs.get("build"))
        if build.startswith(WITHOUT):
            key = tuple(result.inputs.get(k) for k in ("model", "quant", "threads", "prompt", "prompt_tokens", "width"))
            passes.setdefault(key, []).append((frozenset(build.removeprefix(WITHOUT).split("+")), result))
    for arms in passes.values():
        arms.sort(key=lambda arm: -len(arm[0]))
        steps: list[Step] = []
        treated: tuple[str, ...] = ()
        for (left, result), before in zip(arms, [arms[0][0], *(left for left, _ in arms)], strict=False):
            if not left <= before:
                break
            treated = (*treated, *sorted(before - left))
            steps.append(Step(treated, result))
        if len(steps) == len(arms) > 1:
            return steps
    return []
