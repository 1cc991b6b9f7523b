"""The ledger's verdicts: every claim of the post held against this machine, every receipt, and plain arithmetic.

``data/ledger.toml`` has the rows; this module has one function a row, named there as ``test``. A function sees one
book (the claims and results of one run) and returns what it found, or ``None`` when that run cannot say. No verdict
is typed anywhere: a row that no function can decide is *not testable here*, with what it would take.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.report.facts import Book, Fact, Published, format_number, is_close
from hiraishin.report.prices import priced

REPRODUCED, DIFFERS, EXPLAINED, NOT_TESTABLE = "reproduced", "differs", "explained", "not testable here"
VERDICTS = (REPRODUCED, DIFFERS, EXPLAINED, NOT_TESTABLE)


@dataclass(frozen=True)
class Finding:
    """What one run (or arithmetic, when ``machine`` is empty) says about a row: its verdict and the evidence."""

    verdict: str
    text: Markup
    machine: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the ledger with its verdict and everything that was found."""

    number: int
    claim: Markup
    rule: str
    needs: str
    published: tuple[Published, ...]
    findings: tuple[Finding, ...]
    figure: str = ""

    @property
    def verdict(self) -> str:
        """The strongest of the findings: measured before explained, and seen somewhere before not seen elsewhere."""
        found = {f.verdict for f in self.findings}
        return next((v for v in VERDICTS if v in found), NOT_TESTABLE)

    @property
    def also(self) -> tuple[str, ...]:
        """Other verdicts, of other machines."""
        found = {f.verdict for f in self.findings}
        return tuple(v for v in VERDICTS if v in found and v != self.verdict)

    def as_json(self) -> dict[str, Any]:
        """Plain data for the download."""
        return {
            "number": self.number,
            "claim": _text(self.claim),
            "rule": self.rule,
            "needs": self.needs,
            "published": {p.key: p.value for p in self.published},
            "verdict": self.verdict,
            "findings": [{"machine": f.machine, "verdict": f.verdict, "text": _text(f.text)} for f in self.findings],
        }


@dataclass
class Judge:
    """What a row's function works with: one book and the published numbers."""

    book: Book
    published: Mapping[str, Published]
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether this run computed on a GPU."""
        backends = {r.inputs.get("backend") for r in self.results()} - {None}
        layers = {r.inputs.get("gpu_layers") for r in self.results()} - {None, 0}
        return bool(self.book.machine.get("gpu")) and (bool(layers) or "cuda" in backends)

    def results(self, kind: str | None = None, **inputs: Any) -> list[Any]:
        """Stored results of a kind with the given inputs."""
        if self.book.results is None:
            return []
        if kind is None:
            return list(self.book.results.results)
        return list(self.book.results.of(kind, **inputs))

    def fact(self, id: str, build: str | None = None, how: str = "", **params: Any) -> Fact | None:
        """A fact with a value, or ``None``."""
        fact = self.book.fact(id, build, how, **params)
        return fact if fact is not None and fact.value is not None else None

    def measured(self, value: float | int, name: str, results: Sequence[Any], unit: str = "") -> Markup:
        """A number computed here from stored results, as an element that names them."""
        keys = " ".join(r.key[:12] for r in results[:20])
        return Markup('<data class="claim" value="{}" data-claim="ledger.{}" data-result="{}">{}</data>').format(
            value, name, keys, format_number(value, unit)
        )


Test = Callable[[Judge], Finding | None]
Arithmetic = Callable[[Mapping[str, Published]], Finding]
TESTS: dict[str, Test] = {}
ARITHMETIC: dict[str, Arithmetic] = {}


def _test(function: Test) -> Test:
    TESTS[function.__name__] = function
    return function


def _arithmetic(function: Arithmetic) -> Arithmetic:
    ARITHMETIC[function.__name__] = function
    return function


def _finding(yes: bool, text: str, *values: Any, **named: Any) -> Finding:
    return Finding(REPRODUCED if yes else DIFFERS, Markup(text).format(*values, **named))


def _computed(value: Any, name: str) -> Markup:
    """A number worked out while this page was made, from the source's arithmetic."""
    shown = format_number(value) if isinstance(value, (int, float)) else str(value)
    return Markup('<data class="claim" value="{}" data-claim="ledger.{}">{}</data>').format(value, name, shown)


# Speculation -----------------------------------------------------------------------------------------------------


def _forked(judge: Judge, **inputs: Any) -> tuple[list[Any], list[Any]]:
    runs = [r for r in judge.results("speculative", build="stock", **inputs) if r.record.get("identical") is not None]
    return runs, [r for r in runs if not r.record["identical"]]


@_test
def text_fork(judge: Judge) -> Finding | None:
    """Row 1. Runs whose prompt was prefilled in two pieces on purpose do not count."""
    runs, forked = _forked(judge, prefill="whole")
    if not runs:
        return None
    if not forked:
        return _finding(False, "none of {} runs left the plain text", judge.measured(len(runs), "runs", runs))
    placed = [r for r in forked if r.record.get("first_differing_byte") is not None]
    if not placed:
        return _finding(
            True,
            "{} of {} runs left the plain text",
            judge.measured(len(forked), "forked", forked),
            judge.measured(len(runs), "runs", runs),
        )
    first = min(placed, key=lambda r: (r.record["first_differing_byte"], r.key))
    return _finding(
        True,
        "prompt <code>{}</code> forks at byte {}",
        first.inputs.get("prompt"),
        judge.measured(first.record["first_differing_byte"], "fork_byte", [first]),
    )


@_test
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


@_test
def rerun_same_byte(judge: Judge) -> Finding | None:
    """Row 3."""
    for matrix in ("matrix24", "matrix208"):
        moved, runs = judge.fact(f"{matrix}.rerun_moved", "stock", "sum"), judge.fact(f"{matrix}.runs", "stock", "sum")
        same = judge.fact(f"{matrix}.identical", "stock", "sum")
        if moved is not None and runs is not None and same is not None:
            if same.value == runs.value:
                return Finding(DIFFERS, Markup("no run forks, so there is no fork to move ({} runs)").format(runs))
            return _finding(moved.value == 0, "{} forks moved when {} runs were made again", moved, runs)
    return None


@_test
def condition(judge: Judge) -> Finding | None:
    """Row 5."""
    differing = judge.fact("replay.differing_positions", "patched", "sum")
    runs, same = _all_runs(judge, "patched")
    if differing is None or not runs:
        return None
    if differing.value:
        return None
    text = "with equal logits ({} rows differ) {} of {} speculative runs equal plain decoding"
    return _finding(
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


@_test
def prefill(judge: Judge) -> Finding | None:
    """Row 6."""
    runs, forked = _forked(judge, prefill="whole", matrix="matrix24")
    other, other_forked = _forked(judge, prefill="last-alone")
    if not runs:
        return None
    shared = _finding(
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


@_test
def guard_cost(judge: Judge) -> Finding | None:
    """Row 27."""
    with_guard = _tokens_a_cycle(judge, True)
    without = _tokens_a_cycle(judge, False)
    if with_guard is None or without is None:
        return None
    (guarded, some), (free, others) = with_guard, without
    text = "{} tokens a cycle with the guard in the client, {} without"
    return _finding(
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


@_test
def matrix208(judge: Judge) -> Finding | None:
    """Row 29."""
    runs, same = judge.fact("matrix208.runs", "patched", "sum"), judge.fact("matrix208.identical", "patched", "sum")
    if runs is None or same is None:
        return None
    return _finding(runs.value == same.value, "{} of {} runs identical", same, runs)


@_test
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
        found.append(Markup("{} of {} ({})").format(same, prompts, _name(claim.params.get("drafter"))))
    return _finding(good, "{} prompts identical", Markup(", ").join(found)) if found else None


def _name(value: Any) -> Markup:
    return Markup('<span class="name">{}</span>').format(str(value))


@_test
def reference(judge: Judge) -> Finding | None:
    """Row 31."""
    rows = judge.fact("reference.differing_rows", "patched", "sum")
    prompts = judge.fact("reference.plain_identical", "patched", "sum")
    if prompts is not None:
        total = re.match(r"of (\d+)", prompts.claims[0].detail)
        n = int(total[1]) if total else int(prompts.value or 0)
        extra = Markup("; {} rows of the replay's traces differ").format(rows) if rows is not None else Markup("")
        good = prompts.value == n and (rows is None or rows.value == 0)
        return Finding(
            REPRODUCED if good else DIFFERS,
            Markup("{} of {} prompts, every logit row{}").format(prompts, _computed(n, "plain_prompts"), extra),
        )
    if rows is not None:
        return _finding(rows.value == 0, "{} rows of the lone token differ between the builds", rows)
    return None


FEWEST_PROMPTS = 8
"""Prompts that a comparison of speeds needs before it is evidence."""


@_test
def plain_speed(judge: Judge) -> Finding | None:
    """Row 36."""
    stock, patched = judge.fact("plain.tokens_per_second", "stock"), judge.fact("plain.tokens_per_second", "patched")
    prompts = {str(r.inputs.get("prompt")) for r in judge.results("plain", build="stock")}
    if stock is None or patched is None or not stock.value or not patched.value or len(prompts) < FEWEST_PROMPTS:
        return None
    return _finding(patched.value / stock.value > 1.04, "interleaved: stock {}, patched {}", stock, patched)


@_test
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
    text = Markup("exact {} the speed of plain decoding ({})").format(gain.times(), _name(claim.params.get("drafter")))
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


@_test
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
    return _finding(
        rates[True][0] > rates[False][0],
        text,
        *(judge.measured(round(rates[s][0], 2), "tokens_per_second", rates[s][1], "tokens/s") for s in (True, False)),
    )


@_test
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
    return _finding(
        mean[True] > mean[False],
        "{} with a graph for each width, {} without",
        *(judge.measured(round(mean[k], 2), "tokens_per_second", used[k], "tokens/s") for k in (True, False)),
    )


@_test
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


# The replay ------------------------------------------------------------------------------------------------------


@_test
def replay_sees_more(judge: Judge) -> Finding | None:
    """Row 8."""
    replays = [r for r in judge.results("replay", build="stock") if r.inputs.get("width", 0) > 1]
    if not replays:
        return None
    silent = [r for r in replays if r.record.get("differing") and not r.record.get("flips")]
    differing = [r for r in replays if r.record.get("differing")]
    if not differing:
        return _finding(
            False, "none of {} replays of the stock build differs", judge.measured(len(replays), "replays", replays)
        )
    past = [r for r in differing if r.record.get("flips", 0) and r.record["differing"] > r.record["flips"]]
    text = "{} of {} replays that differ do so without one flip, where text shows nothing"
    return _finding(
        bool(silent or past),
        text,
        judge.measured(len(silent), "silent", silent),
        judge.measured(len(differing), "differing", differing),
    )


@_test
def width_two(judge: Judge) -> Finding | None:
    """Row 9."""
    two = list(judge.results("replay", build="stock", width=2))
    if not two:
        return None
    flips = max(int(r.record.get("flips") or 0) for r in two)
    largest = judge.fact("replay.max_abs_diff", "stock", "max")
    first = judge.fact("replay.first_differing_width", "stock", "min")
    text = Markup("at a width of two up to {} flips a prompt").format(judge.measured(flips, "flips", two))
    if first is not None and largest is not None:
        text += Markup("; differences begin at a width of {} and reach {}").format(first, largest)
    margins = [
        judge.fact(f"replay.{which}_flip_margin", "stock", how)
        for which, how in (("smallest", "min"), ("largest", "max"))
    ]
    if all(m is not None for m in margins):
        text += Markup("; flips at margins from {} to {}").format(*margins)
    return Finding(REPRODUCED if flips else DIFFERS, text)


@_test
def replay_zero(judge: Judge) -> Finding | None:
    """Row 28."""
    named = [q for q in ("Q4_K_M", "Q6_K") if judge.book.has("replay.positions_compared", "patched", quant=q)]
    if not named:
        return None
    compared = judge.fact("replay.positions_compared", "patched", "sum", quant=named)
    differing = judge.fact("replay.differing_positions", "patched", "sum", quant=named)
    if compared is None or differing is None or not compared.value:
        return None
    types = Markup(" and ").join(Markup("<code>{}</code>").format(q) for q in named)
    return _finding(differing.value == 0, "{} of {} rows differ ({})", differing, compared, types)


def _patched(judge: Judge, at: Callable[[Any], bool] = lambda r: True) -> Finding | None:
    results = [r for r in judge.results("replay", build="patched") if r.inputs.get("width", 0) > 1 and at(r)]
    if not judge.on_gpu or not results:
        return None
    differing = sum(int(r.record["differing"]) for r in results)
    compared = sum(int(r.record["positions"]) for r in results)
    return _finding(
        differing == 0,
        "{} of {} rows differ",
        judge.measured(differing, "differing", results),
        judge.measured(compared, "compared", results),
    )


def _quantized(r: Any) -> bool:
    return str(r.inputs.get("quant", "")).upper() not in ("F32", "F16", "BF16", "")


@_test
def gpu_exact(judge: Judge) -> Finding | None:
    """Row 14: the quantized mat-vec is what the claim is about."""
    return _patched(judge, _quantized)


@_test
def gpu_exact_wide(judge: Judge) -> Finding | None:
    """Row 15."""
    return _patched(judge, lambda r: r.inputs["width"] > 8 and _quantized(r))


def _origins(judge: Judge, at: Callable[[int], bool]) -> list[tuple[Any, Mapping[str, Any]]]:
    found = []
    for r in judge.results("localize", build="stock"):
        width = int(r.inputs.get("width") or r.record.get("width") or 0)
        origins = r.record.get("origins") or []
        if at(width) and origins and isinstance(origins[0], Mapping):
            found.append((r, origins[0]))
    return found


@_test
def leaves_matvec(judge: Judge) -> Finding | None:
    """Row 13."""
    if not judge.on_gpu:
        return None
    wide = [(r, o) for r, o in _origins(judge, lambda w: w >= 9) if "MUL_MAT" in str(o.get("op", ""))]
    narrow = [(r, o) for r, o in _origins(judge, lambda w: 5 <= w <= 8)]
    if not wide or not narrow:
        return None
    largest = [max(float(o.get("max_abs_diff") or 0) for _, o in group) for group in (narrow, wide)]
    text = "products differ by {} from five to eight tokens and by {} from nine"
    return _finding(
        largest[1] > 10 * largest[0],
        text,
        judge.measured(largest[0], "difference", [r for r, _ in narrow]),
        judge.measured(largest[1], "difference", [r for r, _ in wide]),
    )


@_test
def attention_origin(judge: Judge) -> Finding | None:
    """Row 16."""
    if not judge.on_gpu:
        return None
    narrow = _origins(judge, lambda w: 2 <= w <= 4)
    if not narrow:
        return None
    _r, origin = narrow[0]
    return _finding(
        "FLASH_ATTN" in str(origin.get("op", "")),
        "first origin of a narrow pass: <code>{}</code>, <code>{}</code>",
        origin.get("op", ""),
        origin.get("tensor", ""),
    )


def _without(judge: Judge, *parts: str) -> list[Any]:
    """Replays of the patched build with at least these parts left out."""
    found = []
    for r in judge.results("replay"):
        build = str(r.inputs.get("build", ""))
        left_out = (
            set(build.removeprefix("patched-without-").split("+")) if build.startswith("patched-without-") else set()
        )
        if left_out and set(parts) <= left_out and r.inputs.get("width", 0) > 1:
            found.append(r)
    return found


def _as_it_is(results: Iterable[Any]) -> list[Any]:
    """Without the runs that made the GPU pretend to be another, or used a switch of llama.cpp's own."""
    return [r for r in results if not r.inputs.get("env")]


def _exactly_without(judge: Judge, *parts: str) -> list[Any]:
    name = {frozenset(parts)}
    return [
        r
        for r in _without(judge, *parts)
        if frozenset(str(r.inputs["build"]).removeprefix("patched-without-").split("+")) in name
    ]


def _sums(results: Iterable[Any]) -> tuple[int, int, float]:
    listed = list(results)
    return (
        sum(int(r.record["differing"]) for r in listed),
        sum(int(r.record["flips"]) for r in listed),
        max((float(r.record.get("max_abs_diff") or 0) for r in listed), default=0.0),
    )


@_test
def ladder_attention(judge: Judge) -> Finding | None:
    """Row 17: attention up to eight queries treated, mat-vec, wider attention and parallel blocks not."""
    runs = [
        r
        for r in _as_it_is(_without(judge, "cuda-mul-mat", "cuda-attention-16", "cuda-parallel-blocks"))
        if "cuda-attention-8" not in str(r.inputs["build"])
    ]
    narrow = [r for r in runs if r.inputs["width"] in (2, 3)]
    wide = [r for r in runs if r.inputs["width"] in (5, 9)]
    if not judge.on_gpu or not narrow or not wide:
        return None
    exact = {r.inputs["prompt"] for r in narrow} - {r.inputs["prompt"] for r in narrow if r.record["differing"]}
    prompts = {r.inputs["prompt"] for r in narrow}
    text = "narrow passes exact on {} of {} prompts; wider ones differ in {} rows"
    return _finding(
        bool(exact) and _sums(wide)[0] > 0,
        text,
        judge.measured(len(exact), "prompts", narrow),
        judge.measured(len(prompts), "prompts", narrow),
        judge.measured(_sums(wide)[0], "differing", wide),
    )


def _reach(judge: Judge, r: Any) -> int:
    """The last KV position of a replay: from its rows, or (receipts leave out rows that are all equal) its trace's."""
    if r.table is not None and len(r.table):
        return int(r.table["kv_position"].max())
    key = ("prompt", "prompt_tokens", "tokens", "model_sha256")
    for t in judge.results("trace"):
        if t.table is not None and all(t.inputs.get(k) == r.inputs.get(k) for k in key):
            return int(t.table["kv_position"].max())
    return 0


def _without_blocks(judge: Judge) -> list[Any]:
    """All treated but the parallel blocks; with the guard if that was run."""
    with_guard = _as_it_is(_exactly_without(judge, "cuda-parallel-blocks"))
    return with_guard or _as_it_is(_exactly_without(judge, "guard", "cuda-parallel-blocks"))


@_test
def ladder_three(judge: Judge) -> Finding | None:
    """Row 18."""
    runs = _without_blocks(judge)
    short = [r for r in runs if 0 < _reach(judge, r) < 384]
    if not judge.on_gpu or not short:
        return None
    return _finding(
        _sums(short)[0] == 0,
        "{} rows differ on prompts that end below the third chunk",
        judge.measured(_sums(short)[0], "differing", short),
    )


@_test
def ladder_long(judge: Judge) -> Finding | None:
    """Row 19."""
    runs = _without_blocks(judge)
    long = [r for r in runs if _reach(judge, r) >= 384]
    if not judge.on_gpu or not long:
        return None
    differing, flips, largest = _sums(long)
    text = "{} rows of long prompts differ, by up to {}, with {} flips"
    return _finding(
        differing > 0,
        text,
        judge.measured(differing, "differing", long),
        judge.measured(largest, "max_abs_diff", long),
        judge.measured(flips, "flips", long),
    )


@_test
def blocks_pinned(judge: Judge) -> Finding | None:
    """Row 26."""
    before = _as_it_is(_exactly_without(judge, "cuda-parallel-blocks"))
    if not judge.on_gpu or not before:
        return None
    prompts = {
        (r.inputs["prompt"], r.inputs["width"], r.inputs.get("quant"), r.inputs.get("model_sha256")) for r in before
    }
    after = [
        r
        for r in _as_it_is(judge.results("replay", build="patched"))
        if (r.inputs["prompt"], r.inputs["width"], r.inputs.get("quant"), r.inputs.get("model_sha256")) in prompts
    ]
    if not after or not _sums(before)[0]:
        return None
    text = "{} becomes {}"
    return _finding(
        _sums(after)[0] == 0,
        text,
        judge.measured(_sums(before)[2], "max_abs_diff", before),
        judge.measured(_sums(after)[2], "max_abs_diff", after),
    )


@_test
def padding_alone(judge: Judge) -> Finding | None:
    """Row 21."""
    runs = _exactly_without(judge, "guard")
    crossing = [r for r in runs if _reach(judge, r) >= 256]
    if not crossing:
        return None
    differing, _, largest = _sums(crossing)
    if not differing:
        return _finding(True, "without the guard {} rows differ", judge.measured(0, "differing", crossing))
    text = "without the guard {} rows differ, by up to {}: here padding moves logits by itself"
    return _finding(
        False, text, judge.measured(differing, "differing", crossing), judge.measured(largest, "max_abs_diff", crossing)
    )


# Price -----------------------------------------------------------------------------------------------------------


def _prices(judge: Judge, width: int, *builds: str) -> list[Fact] | None:
    """The prices of a pass for several builds, all from one unit and a steady one; ``None`` when there is none."""
    for unit in priced(judge.book):
        if unit.steady and all((build, width) in unit.claims for build in builds):
            claims = [unit.claims[build, width] for build in builds]
            return [Fact(c.value, "x", (c,)) for c in claims]
    return None


def _fast_part(judge: Judge) -> str:
    return "patched-without-cuda-fast" if judge.on_gpu else "patched-without-cpu-fast"


@_test
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


@_test
def generic_price(judge: Judge) -> Finding | None:
    """Row 32."""
    found = _prices(judge, 9, _fast_part(judge), "stock")
    if found is None:
        return None
    generic, stock = found
    return _finding(
        (generic.value or 0) > (stock.value or 0), "generic exact {}, stock {}", generic.times(), stock.times()
    )


@_test
def fast_price(judge: Judge) -> Finding | None:
    """Row 35."""
    found = _prices(judge, 9, _fast_part(judge), "patched")
    if found is None:
        return None
    generic, fast = found
    return _finding((fast.value or 0) < (generic.value or 0), "{} against {} generic", fast.times(), generic.times())


@_test
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
    differing = _sums(replays)[0]
    reached = (exact.value or 9) <= (stock.value or 0) and differing == 0
    shown = judge.measured(differing, "differing", replays)
    return _finding(reached, "exact {}, stock {} ({} rows differ)", exact.times(), stock.times(), shown)


# Arithmetic and compiled code -------------------------------------------------------------------------------------


@_arithmetic
def float_spacing(published: Mapping[str, Published]) -> Finding:
    """Row 7: numpy's float32, now."""
    from hiraishin.numerics import spacing, sum_in_order

    gap = float(spacing(1e8))
    sums = [float(sum_in_order((1e8, 1.0, -1e8), order)) for order in ((0, 1, 2), (0, 2, 1))]
    wanted = [published[f"float.{k}"].value for k in ("spacing_at_1e8", "one_order", "other_order")]
    return _finding(
        [gap, *sums] == wanted,
        "Spacing {}, sums {} and {}",
        _computed(gap, "spacing"),
        *(_computed(s, "sum") for s in sums),
    )


@_arithmetic
def q6_k_row(published: Mapping[str, Published]) -> Finding:
    """Row 10."""
    import numpy as np

    from hiraishin.numerics import real_row

    row = real_row(0)
    blocks = len(row.packed) // 210  # bytes of a Q6_K block (ggml-common.h: 128 + 64 + 16 + 2)
    products = row.quants.astype(np.int64)
    forwards, backwards = int(products.sum()), int(products[::-1].sum())
    good = (
        blocks == published["matvec.row_blocks"].value
        and len(row.quants) == published["matvec.row_length"].value
        and forwards == backwards
    )
    return Finding(
        EXPLAINED if good else DIFFERS,
        Markup("A stored row has {} blocks; its integers sum to the same in both directions").format(
            _computed(blocks, "blocks")
        ),
    )


@_arithmetic
def warp_walk(published: Mapping[str, Published]) -> Finding:
    """Row 11."""
    from hiraishin.numerics import bits, mul_mat_vec_q6_k, real_row, warp_blocks

    blocks = int(published["matvec.row_blocks"].value)
    four, two = warp_blocks(blocks, 4), warp_blocks(blocks, 2)
    row = real_row(0)
    values = [mul_mat_vec_q6_k(row.packed, row.quants, row.scales8, n).value for n in (4, 2)]
    good = (
        four[0] == tuple(range(0, blocks, 4))
        and two[0] == tuple(range(0, blocks, 2))
        and bits(values[0]) != bits(values[1])
    )
    text = Markup(
        "Computed: the first of four warps takes blocks {}, of two {}; a real row sums to <code>{}</code> and <code>{}</code>"
    )
    return Finding(
        EXPLAINED if good else DIFFERS,
        text.format(
            *(Markup("<code>{}</code>").format(" ".join(map(str, w[0]))) for w in (four, two)),
            *(bits(v) for v in values),
        ),
    )


@_arithmetic
def warp_count(published: Mapping[str, Published]) -> Finding:
    """Row 12."""
    from hiraishin.numerics import nwarps_for

    counts = [nwarps_for(n) for n in range(1, 9)]
    wanted = [int(published["matvec.warps_1_to_4"].value)] * 4 + [int(published["matvec.warps_5_to_8"].value)] * 4
    return Finding(
        EXPLAINED if counts == wanted else DIFFERS,
        Markup("The source's table: {} for one to four tokens, {} for five to eight").format(
            _computed(counts[0], "warps"), _computed(counts[4], "warps")
        ),
    )


@_arithmetic
def padding_constant(published: Mapping[str, Published]) -> Finding:
    """Row 20."""
    from hiraishin.numerics.occupancy import PADDING, padded

    good = padded(1) == PADDING == published["attention.padding"].value and padded(PADDING + 1) == 2 * PADDING
    return Finding(
        EXPLAINED if good else DIFFERS,
        Markup("The source rounds up to a multiple of {}; the step from one to two of them shows in the replay").format(
            _computed(PADDING, "padding")
        ),
    )


POST_ARCH = 120
"""Compute capability of the post's GPU generation, as the compiled kernels are listed (sm_120)."""


def _post_gpu() -> Any:
    from hiraishin.numerics.occupancy import Gpu, VectorAttention

    one, two = (_registers(kernel="flash_attn_ext_vec", head=128, type="F16", queries=queries) for queries in (1, 2))
    return VectorAttention(Gpu(load_compiled()["gpu"]["sms"]), one, two)


@_arithmetic
def first_position_model(published: Mapping[str, Published]) -> Finding:
    """Row 22, from arithmetic."""
    first = _post_gpu().first_differing_position(2)
    boundary = published["long.clean_below_kv"].value
    text = Markup("From registers and multiprocessors alone: the first position that differs among two is {}").format(
        _computed(first, "position")
    )
    return Finding(EXPLAINED if first == boundary else DIFFERS, text)


def _first_position_run(judge: Judge) -> Finding | None:
    """Row 22, where a GPU was made to pretend the post's number of multiprocessors."""
    sms = load_compiled()["gpu"]["sms"]
    runs = [
        r
        for r in _exactly_without(judge, "cuda-parallel-blocks")
        + _exactly_without(judge, "guard", "cuda-parallel-blocks")
        if r.inputs["width"] == 2 and f"GGML_CUDA_TEST_NSM={sms}" in str(r.inputs.get("env") or "").split()
    ]
    places = [r.record["first_differing_kv"] for r in runs if r.record["differing"]]
    if not judge.on_gpu or not places:
        return None
    clean, seen = (judge.published[f"long.{k}"].value for k in ("clean_below_kv", "first_differing_kv"))
    return _finding(
        clean <= min(places) <= seen,
        "made to share its work as {} multiprocessors would, two tokens first differ at KV position {}",
        _computed(sms, "multiprocessors"),
        judge.measured(min(places), "position", runs),
    )


TESTS["first_position_model"] = _first_position_run


@_arithmetic
def chunks_dealt(published: Mapping[str, Published]) -> Finding:
    """Row 23."""
    from hiraishin.numerics.attention import gpu_attention, made_up_cache
    from hiraishin.numerics.occupancy import CHUNK, chunk_owners

    owners = chunk_owners(512, 3)
    q, k, v = made_up_cache(512, 128)
    moved = bool((gpu_attention(q, k, v, 390, 4).output != gpu_attention(q, k, v, 390, 3).output).any())
    good = owners == [0, 1, 2, 0] and published["attention.chunk"].value == CHUNK and moved
    return Finding(
        EXPLAINED if good else DIFFERS,
        Markup(
            "Modelled bit by bit: chunks of {} dealt in turn, and the output {} on how many blocks there are"
        ).format(_computed(CHUNK, "chunk"), "depends" if moved else "does not depend"),
    )


@_arithmetic
def occupancy(published: Mapping[str, Published]) -> Finding:
    """Row 24."""
    gpu = _post_gpu()
    one, two = gpu.p(1, 512), gpu.p(2, 512)
    good = (
        one == published["attention.blocks_one_query"].value and two == published["attention.blocks_two_queries"].value
    )
    text = Markup("{} and {} registers a thread give {} and {} parallel blocks on the post’s GPU").format(
        _computed(gpu.registers_one, "registers"),
        _computed(gpu.registers_many, "registers"),
        _computed(one, "blocks"),
        _computed(two, "blocks"),
    )
    return Finding(EXPLAINED if good else DIFFERS, text)


@_arithmetic
def masked_chunk(published: Mapping[str, Published]) -> Finding:
    """Row 25."""
    from hiraishin.numerics.attention import gpu_attention, made_up_cache

    q, k, v = made_up_cache(512, 128)
    changed = {
        position: int((gpu_attention(q, k, v, position, 4).output != gpu_attention(q, k, v, position, 3).output).sum())
        for position in (300, 390)
    }
    text = Markup("Modelled: {} of the outputs change for the earlier query, {} for the later one").format(
        *(_computed(n, "outputs") for n in changed.values())
    )
    return Finding(EXPLAINED if changed[300] == 0 and changed[390] > 0 else DIFFERS, text)


@_arithmetic
def shared_loads(published: Mapping[str, Published]) -> Finding:
    """Row 33."""
    loads = {int(n): int(v) for n, v in load_compiled()["matvec"]["Q4_K"]["loads"].items()}
    (a, la), (b, lb), (c, lc) = sorted(loads.items())
    each = (lb - la) / (b - a)
    fixed = la - each * a
    linear = is_close(lc, fixed + each * c)
    text = Markup("Compiled for that GPU: {} loads whatever the width and {} a column").format(
        _computed(fixed, "loads"), _computed(each, "loads")
    )
    return Finding(EXPLAINED if linear and fixed > 0 else DIFFERS, text)


@_arithmetic
def registers(published: Mapping[str, Published]) -> Finding:
    """Row 34."""
    pairs = {
        name: [_registers(kernel="mul_mat_vec_q", type=name, columns=n, geometry="stock") for n in (1, 8)]
        for name in ("Q4_K", "Q6_K")
    }
    text = Markup("; ").join(
        Markup("<code>{}</code>: {} at one column, {} at eight").format(
            name, _computed(a, "registers"), _computed(b, "registers")
        )
        for name, (a, b) in pairs.items()
    )
    return Finding(EXPLAINED if all(b >= 1.8 * a for a, b in pairs.values()) else DIFFERS, text)


# The table -------------------------------------------------------------------------------------------------------


def load_compiled(path: Path | None = None) -> dict[str, Any]:
    """What the compiled code does not tell of itself, or was counted in it by hand (``data/published/compiled.toml``)."""
    return _read(path or paths.published_dir() / "compiled.toml")


def _registers(**wanted: Any) -> int:
    """Registers a thread of a kernel compiled for the post's GPU generation (``data/compiled/registers.json``).

    Raises:
        UserError: the file is missing, or holds no such kernel.
    """
    path = paths.ROOT / "data" / "compiled" / "registers.json"
    try:
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path.name} cannot be read: {error}", "It is part of the project: restore it with git."
        ) from error
    for kernel in kernels:
        if kernel.get("arch") == POST_ARCH and all(kernel.get(k) == v for k, v in wanted.items()):
            return int(kernel["registers"])
    raise UserError(
        f"{path.name} holds no kernel with {wanted}",
        "data/compiled/extract_registers.py reads it from the compiled code.",
    )


def load_rows(path: Path | None = None) -> list[dict[str, Any]]:
    """The rows of ``data/ledger.toml``.

    Raises:
        UserError: the file is missing or malformed.
    """
    rows: list[dict[str, Any]] = _read(path or paths.ROOT / "data" / "ledger.toml")["row"]
    return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"{path.name} cannot be read: {error}", "It is part of the project: restore it with git."
        ) from error


def rows(books: Sequence[Book], published: Mapping[str, Published], source: Path | None = None) -> list[Row]:
    """Every row with its verdict, from the books given (the run of this report first, then receipts).

    A test that breaks on one book's data is reported as a finding-less book, never as a verdict; the error's text is
    kept in the row's ``needs``.
    """
    judges = [Judge(book, published) for book in books]
    made = []
    for entry in load_rows(source):
        name = entry["test"]
        if name not in TESTS and name not in ARITHMETIC:
            raise UserError(
                f"the ledger's row {entry['number']} names no test: {name!r}", "Add it to hiraishin/ledger.py."
            )
        findings: list[Finding] = []
        needs = entry.get("needs", "")
        for judge in judges:
            if name not in TESTS:
                break
            try:
                found = TESTS[name](judge)
            except (KeyError, TypeError, ValueError, LookupError) as error:
                needs = (
                    f"{needs}; the results of {judge.book.label} could not be read ({type(error).__name__}: {error})"
                )
                continue
            if found is not None:
                findings.append(Finding(found.verdict, found.text, judge.book.label))
        if name in ARITHMETIC:
            findings.append(ARITHMETIC[name](published))
        made.append(
            Row(
                entry["number"],
                _claim_text(entry["claim"], published),
                entry["rule"],
                needs,
                tuple(published[key] for key in entry.get("published", [])),
                tuple(findings),
                entry.get("figure", ""),
            )
        )
    return made


def _claim_text(text: str, published: Mapping[str, Published]) -> Markup:
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\{([\w.]+)\}", lambda m: published[m[1]].__html__(), safe))


def _text(markup: Markup) -> str:
    return str(markup.striptags())


def view(rows: Sequence[Row], figures: Mapping[str, Any], published: Mapping[str, Published]) -> dict[str, Any]:
    """What the article's template shows."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    listed = []
    for row in rows:
        slot = figures.get(row.figure)
        listed.append(
            {
                "number": row.number,
                "claim": row.claim,
                "rule": row.rule,
                "findings": row.findings,
                "needs": "" if row.findings else row.needs,
                "figure": slot if slot is not None and slot.ok and slot.placed else None,
                "verdicts": [
                    {"name": v, "slug": v.split(" here")[0].replace(" ", "-")} for v in (row.verdict, *row.also)
                ],
            }
        )
    return {
        "rows": listed,
        "counts": [
            {
                "fact": Markup('<data class="claim" value="{0}" data-claim="ledger.{1}">{0}</data>').format(
                    n, verdict.replace(" ", "-")
                ),
                "label": verdict,
            }
            for verdict, n in counts.items()
        ],
    }
