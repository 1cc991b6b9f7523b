"""Rows about the price of a pass, each from one steady unit."""

from __future__ import annotations

from markupsafe import Markup

from hiraishin.ledger.base import (
    DIFFERS,
    REPRODUCED,
    Finding,
    Judge,
    finding,
    row_test,
)
from hiraishin.ledger.replaying import sums
from hiraishin.report.facts import Fact
from hiraishin.report.prices import priced


def _prices(judge: Judge, width: int, *builds: str) -> list[Fact] | None:
    """The prices of a pass for several builds, all from one unit and a steady one; ``None`` when there is none."""
    for unit in priced(judge.book):
        if unit.steady and all((build, width) in unit.claims for build in builds):
            claims = [unit.claims[build, width] for build in builds]
            return [Fact(c.value, "x", (c,)) for c in claims]
    return None


def _fast_part(judge: Judge) -> str:
    return "patched-without-cuda-fast" if judge.on_gpu else "patched-without-cpu-fast"


@row_test
def second_token(judge: Judge) -> Finding | None:
    """Row 4."""
    found = _prices(judge, 2, "stock")
    if found is None:
        return None
    (price,) = found
    text = Markup("a second token costs {} of one").format(price.times())
    bandwidth = judge.fact("bandwidth.gb_per_s", None, "max")
    if bandwidth is not None:
        text += Markup("; memory reads at {} GB/s").format(bandwidth.plain())
    return Finding(REPRODUCED if (price.value or 9) <= 1.1 else DIFFERS, text)


@row_test
def generic_price(judge: Judge) -> Finding | None:
    """Row 32."""
    found = _prices(judge, 9, _fast_part(judge), "stock")
    if found is None:
        return None
    generic, stock = found
    return finding(
        (generic.value or 0) > (stock.value or 0), "generic exact {}, stock {}", generic.times(), stock.times()
    )


@row_test
def fast_price(judge: Judge) -> Finding | None:
    """Row 35."""
    found = _prices(judge, 9, _fast_part(judge), "patched")
    if found is None:
        return None
    generic, fast = found
    return finding((fast.value or 0) < (generic.value or 0), "{} against {} generic", fast.times(), generic.times())


@row_test
def goal(judge: Judge) -> Finding | None:
    """Row 41."""
    found = _prices(judge, 9, "patched", "stock")
    if found is None:
        return None
    exact, stock = found
    about = exact.claims[0].params
    replays = [
        r
        for r in judge.results("replay", build="patched", quant=about.get("quant"))
        if "model" not in about or r.inputs.get("model") == about["model"]
    ]
    if not replays:
        return None
    differing = sums(replays)[0]
    reached = (exact.value or 9) <= (stock.value or 0) and differing == 0
    shown = judge.measured(differing, "differing", replays)
    return finding(reached, "exact {}, stock {} ({} rows differ)", exact.times(), stock.times(), shown)
