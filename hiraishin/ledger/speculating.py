"""Rows about speculative runs: forks, prompts, speed, the cycle."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from hiraishin.ledger.base import (
    DIFFERS,
    REPRODUCED,
    Finding,
    Judge,
    computed,
    finding,
    named,
    row_test,
)
from hiraishin.report.facts import Fact


def _forked(judge: Judge, **inputs: Any) -> tuple[list[Any], list[Any]]:
    runs = [r for r in judge.results("speculative", build="stock", **inputs) if r.record.get("identical") is not None]
    return runs, [r for r in runs if not r.record["identical"]]


@row_test
def text_fork(judge: Judge) -> Finding | None:
    """Row 1. Runs whose prompt was prefilled in two pieces on purpose do not count."""
    runs, forked = _forked(judge, prefill="whole")
    if not runs:
        return None
    if not forked:
        return finding(False, "none of {} runs left the plain text", judge.measured(len(runs), "runs", runs))
    placed = [r for r in forked if r.record.get("first_differing_byte") is not None]
    if not placed:
        return finding(
            True,
            "{} of {} runs left the plain text",
            judge.measured(len(forked), "forked", forked),
            judge.measured(len(runs), "runs", runs),
        )
    first = min(placed, key=lambda r: (r.record["first_differing_byte"], r.key))
    return finding(
        True,
        "prompt <code>{}</code> forks at byte {}",
        first.inputs.get("prompt"),
        judge.measured(first.record["first_differing_byte"], "fork_byte", [first]),
    )


@row_test
def matrix_forks(judge: Judge) -> Finding | None:
    """Row 2."""
    runs, same = judge.fact("matrix24.runs", "stock", "sum"), judge.fact("matrix24.identical", "stock", "sum")
    if runs is None or same is None:
        return None
    forked = Fact((runs.value or 0) - (same.value or 0), "", runs.claims + same.claims, "difference")
    text = Markup("{} runs: {} equal, {} fork").format(runs, same, forked)
    made = judge.results("speculative", build="stock", matrix="matrix24")
    settings = {(r.inputs.get("prompt"), r.inputs.get("draft_length")) for r in made}
    if settings and len(made) == 2 * len(settings):
        text += Markup(" ({} settings, each run twice)").format(judge.measured(len(settings), "settings", made))
    return Finding(REPRODUCED if forked.value else DIFFERS, text)


@row_test
def rerun_same_byte(judge: Judge) -> Finding | None:
    """Row 3."""
    for matrix in ("matrix24", "matrix208"):
        moved, runs = judge.fact(f"{matrix}.rerun_moved", "stock", "sum"), judge.fact(f"{matrix}.runs", "stock", "sum")
        same = judge.fact(f"{matrix}.identical", "stock", "sum")
        if moved is not None and runs is not None and same is not None:
            if same.value == runs.value:
                return Finding(DIFFERS, Markup("no run forks, so there is no fork to move ({} runs)").format(runs))
            return finding(moved.value == 0, "{} forks moved when {} runs were made again", moved, runs)
    return None


@row_test
def condition(judge: Judge) -> Finding | None:
    """Row 5."""
    differing = judge.fact("replay.differing_positions", "patched", "sum")
    runs, same = _all_runs(judge, "patched")
    if differing is None or not runs:
        return None
    if differing.value:
        return None
    text = "with equal logits ({} rows differ) {} of {} speculative runs equal plain decoding"
    return finding(
        len(same) == len(runs),
        text,
        differing,
        judge.measured(len(same), "identical", same),
        judge.measured(len(runs), "runs", runs),
    )


def _all_runs(judge: Judge, build: str) -> tuple[list[Any], list[Any]]:
    # Runs prefilled in two pieces on purpose start from another cache than the plain decode: no test of the condition.
    found = judge.results("speculative", build=build, prefill="whole")
    runs = [r for r in found if r.record.get("identical") is not None]
    return runs, [r for r in runs if r.record["identical"]]


@row_test
def prefill(judge: Judge) -> Finding | None:
    """Row 6."""
    runs, forked = _forked(judge, prefill="whole", matrix="matrix24")
    other, other_forked = _forked(judge, prefill="last-alone")
    if not runs:
        return None
    shared = finding(
        bool(forked),
        "same prefill: {} of {} runs fork",
        judge.measured(len(forked), "forked", forked),
        judge.measured(len(runs), "runs", runs),
    )
    if not other:
        return shared
    text = Markup("{}; last prompt token alone: {} of {}").format(
        shared.text,
        judge.measured(len(other_forked), "forked", other_forked),
        judge.measured(len(other), "runs", other),
    )
    return Finding(shared.verdict, text)


@row_test
def guard_cost(judge: Judge) -> Finding | None:
    """Row 27."""
    with_guard = _tokens_a_cycle(judge, True)
    without = _tokens_a_cycle(judge, False)
    if with_guard is None or without is None:
        return None
    (guarded, some), (free, others) = with_guard, without
    text = "{} tokens a cycle with the guard in the client, {} without"
    return finding(
        guarded >= 0.95 * free,
        text,
        judge.measured(round(guarded, 3), "tokens_per_cycle", some),
        judge.measured(round(free, 3), "tokens_per_cycle", others),
    )


def _tokens_a_cycle(judge: Judge, guard: bool) -> tuple[float, list[Any]] | None:
    # Only matrices that were run both ways, so that the two numbers are about the same prompts.
    both = {r.inputs.get("matrix") for r in judge.results("speculative", build="patched", client_guard=True)} & {
        r.inputs.get("matrix") for r in judge.results("speculative", build="patched", client_guard=False)
    }
    runs = [
        r for r in judge.results("speculative", build="patched", client_guard=guard) if r.inputs.get("matrix") in both
    ]
    cycles = sum(r.record.get("cycles") or 0 for r in runs)
    return (sum(r.record.get("tokens") or 0 for r in runs) / cycles, runs) if cycles else None


@row_test
def matrix208(judge: Judge) -> Finding | None:
    """Row 29."""
    runs, same = judge.fact("matrix208.runs", "patched", "sum"), judge.fact("matrix208.identical", "patched", "sum")
    if runs is None or same is None:
        return None
    return finding(runs.value == same.value, "{} of {} runs identical", same, runs)


@row_test
def evaluation(judge: Judge) -> Finding | None:
    """Row 30."""
    found = []
    good = True
    for claim in judge.book.find("evaluate.prompts", "patched"):
        prompts = Fact(claim.value, claim.unit, (claim,))
        same = judge.fact("evaluate.identical", "patched", "min", **claim.params)
        if same is None or prompts.value is None:
            continue
        good = good and same.value == prompts.value
        found.append(Markup("{} of {} ({})").format(same, prompts, named(claim.params.get("drafter"))))
    return finding(good, "{} prompts identical", Markup(", ").join(found)) if found else None


@row_test
def reference(judge: Judge) -> Finding | None:
    """Row 31."""
    rows = judge.fact("reference.differing_rows", "patched", "sum")
    prompts = judge.fact("reference.plain_identical", "patched", "sum")
    if prompts is not None:
        # A machine can have several receipts with plain decoding: their prompts are summed, so are those they are of.
        totals = [re.match(r"of (\d+)", claim.detail) for claim in prompts.claims]
        n = sum(int(found[1]) for found in totals if found) if all(totals) else int(prompts.value or 0)
        extra = Markup("; {} rows of the replay's traces differ").format(rows) if rows is not None else Markup("")
        good = prompts.value == n and (rows is None or rows.value == 0)
        return Finding(
            REPRODUCED if good else DIFFERS,
            Markup("{} of {} prompts, every logit row{}").format(prompts, computed(n, "plain_prompts"), extra),
        )
    if rows is not None:
        return finding(rows.value == 0, "{} rows of the lone token differ between the builds", rows)
    return None


FEWEST_PROMPTS = 8
"""Prompts that a comparison of speeds needs before it is evidence."""


@row_test
def plain_speed(judge: Judge) -> Finding | None:
    """Row 36."""
    stock, patched = judge.fact("plain.tokens_per_second", "stock"), judge.fact("plain.tokens_per_second", "patched")
    prompts = {str(r.inputs.get("prompt")) for r in judge.results("plain", build="stock")}
    if stock is None or patched is None or not stock.value or not patched.value or len(prompts) < FEWEST_PROMPTS:
        return None
    return finding(patched.value / stock.value > 1.04, "interleaved: stock {}, patched {}", stock, patched)


@row_test
def speculation_pays(judge: Judge) -> Finding | None:
    """Row 37: each run against plain decoding of its prompt in the same process, where runs know that."""
    gains = [
        (gain, claim)
        for claim in judge.book.find("speculative.tokens_per_second", "patched")
        if claim.value is not None and str(claim.params.get("matrix", "")).startswith("evaluation")
        for gain in [_gain(judge, claim)]
        if gain is not None
    ]
    if not gains:
        return None
    (gain, least), claim = max(gains, key=lambda g: g[0][0].value or 0.0)
    prompts = judge.fact("evaluate.prompts", "patched", "max", **claim.params)
    same = judge.fact("evaluate.identical", "patched", "min", **claim.params)
    stock = judge.book.find("speculative.tokens_per_second", "stock", **claim.params)
    stock_same = judge.fact("evaluate.identical", "stock", "min", **claim.params)
    exact = prompts is not None and same is not None and prompts.value == same.value
    text = Markup("exact {} the speed of plain decoding ({})").format(gain.times(), named(claim.params.get("drafter")))
    if prompts is not None and same is not None:
        text += Markup(", {} of {} identical").format(same, prompts)
    stock_gain = _gain(judge, stock[0]) if stock else None
    if stock_gain is not None and stock_same is not None:
        text += Markup("; stock {}, {} identical").format(stock_gain[0].times(), stock_same)
    return Finding(REPRODUCED if exact and least > 1 else DIFFERS, text)


def _gain(judge: Judge, speed: Any) -> tuple[Fact, float] | None:
    """Speculative over plain speed, and the lower end of its 95 % interval where that is known."""
    if speed.value is None:
        return None
    paired = judge.fact("speculative.speedup", speed.build, "max", **speed.params)
    if paired is not None:
        found = re.search(r"95 % interval ([0-9.]+)", paired.claims[0].detail)
        return Fact(paired.value, "x", paired.claims), float(found[1]) if found else float(paired.value or 0)
    plain = judge.fact("plain.tokens_per_second", speed.build)
    if plain is None or not plain.value:
        return None
    gain = Fact(speed.value / plain.value, "x", (speed, *plain.claims), "ratio")
    return gain, float(gain.value or 0)


@row_test
def margin_stop(judge: Judge) -> Finding | None:
    """Row 38."""
    speeds: dict[bool, list[Any]] = {True: [], False: []}
    for r in judge.results("speculative", build="patched"):
        drafter = str(r.inputs.get("drafter", ""))
        if drafter.startswith("model "):  # drafters.drafter_name: "model Q2_K, margin 3" or "model Q2_K, no margin"
            speeds[not drafter.endswith("no margin")].append(r)
    both = {r.inputs.get("prompt") for r in speeds[True]} & {r.inputs.get("prompt") for r in speeds[False]}
    rates = {}
    for stops, runs in speeds.items():
        mine = [r for r in runs if r.inputs.get("prompt") in both]
        seconds = sum(
            sum(float(r.record["seconds"].get(part) or 0) for part in ("draft", "verify", "bookkeeping")) for r in mine
        )
        if not mine or not seconds:
            return None
        rates[stops] = (sum(r.record["tokens"] for r in mine) / seconds, mine)
    text = "{} with the stop, {} without"
    return finding(
        rates[True][0] > rates[False][0],
        text,
        *(judge.measured(round(rates[s][0], 2), "tokens_per_second", rates[s][1], "tokens/s") for s in (True, False)),
    )


@row_test
def graph_cache(judge: Judge) -> Finding | None:
    """Row 39."""
    if not judge.on_gpu:
        return None
    by: dict[bool, list[float]] = {True: [], False: []}
    used: dict[bool, list[Any]] = {True: [], False: []}
    for r in judge.results("speculative"):
        if not str(r.inputs.get("build", "")).startswith("patched"):
            continue
        seconds = sum(float(r.record["seconds"].get(part) or 0) for part in ("draft", "verify", "bookkeeping"))
        if seconds:
            kept = "cuda-graphs" not in str(r.inputs["build"])
            by[kept].append(r.record["tokens"] / seconds)
            used[kept].append(r)
    if not by[True] or not by[False]:
        return None
    mean = {k: sum(v) / len(v) for k, v in by.items()}
    return finding(
        mean[True] > mean[False],
        "{} with a graph for each width, {} without",
        *(judge.measured(round(mean[k], 2), "tokens_per_second", used[k], "tokens/s") for k in (True, False)),
    )


@row_test
def cycle(judge: Judge) -> Finding | None:
    """Row 40."""
    for claim in judge.book.find("cycle.verify_ms", "patched"):
        if claim.value is None or not str(claim.params.get("matrix", "")).startswith("evaluation"):
            continue
        parts = {
            p: judge.fact(f"cycle.{p}_ms", "patched", "max", **claim.params) for p in ("draft", "verify", "bookkeeping")
        }
        tokens = judge.fact("speculative.tokens_per_cycle", "patched", "max", **claim.params)
        lone = _plain_ms(judge, claim)
        acceptance = judge.fact("speculative.acceptance", "patched", "max", **claim.params)
        if any(p is None for p in parts.values()) or tokens is None or lone is None or not tokens.value:
            continue
        total = sum(float(p.value or 0) for p in parts.values() if p is not None)
        each = Fact(
            total / tokens.value, "ms", tuple(c for p in parts.values() if p for c in p.claims) + tokens.claims, "ratio"
        )
        book = parts["bookkeeping"]
        small = book is not None and float(book.value or 0) < 0.03 * total
        text = Markup("{} drafting, {} verifying, {} bookkeeping, {} tokens out; {} a token against {} plain").format(
            parts["draft"], parts["verify"], parts["bookkeeping"], tokens, each, lone[1]
        )
        if acceptance is not None:
            text += Markup("; {} accepted").format(acceptance.percent(1))
        return Finding(REPRODUCED if (each.value or 0) < lone[0] and small else DIFFERS, text)
    return None


def _plain_ms(judge: Judge, claim: Any) -> tuple[float, Markup | Fact] | None:
    """Milliseconds of a plain token: of the runs behind a claim, in their own processes, where they know; else of all prompts."""
    same = {k: claim.params[k] for k in ("matrix", "drafter", "prefill", "client_guard", "quant") if k in claim.params}
    runs = [r for r in judge.results("speculative", build="patched", **same) if r.record.get("plain_tokens_per_second")]
    tokens = sum(int(r.record["tokens"]) for r in runs)
    if tokens:
        ms = 1e3 * sum(int(r.record["tokens"]) / float(r.record["plain_tokens_per_second"]) for r in runs) / tokens
        return ms, judge.measured(ms, "plain_ms", runs, "ms")
    plain = judge.fact("plain.tokens_per_second", "patched")
    if plain is None or not plain.value:
        return None
    return 1e3 / plain.value, Fact(1e3 / plain.value, "ms", plain.claims, "ratio")
