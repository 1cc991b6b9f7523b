"""Prompts x drafters x draft lengths on one build: is the text the plain text, where not, why, and how fast.

The child half (:func:`measure`) takes one prompt on one arm: it prefills once with the switch off, decodes plainly
with the switch as asked, and then runs every speculative run of the matrix from the same cache. All comparisons
are with the same build's plain decode (:mod:`hiraishin.forks` says where a run leaves it, and why); builds are tied
together by ``rows_sha256`` of the plain decodes.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hiraishin.drafters import drafter_name, make_drafter
from hiraishin.errors import UserError
from hiraishin.forks import (
    Plain,
    RowWatch,
    first_difference,
    fork_record,
    record_plain,
)
from hiraishin.llama import SWITCH_OFF, Logits, Model, Session, fallbacks, get_model, set_switch
from hiraishin.results import canonical_json
from hiraishin.speculative import (
    Cycle,
    Decoder,
    Drafter,
    Run,
    check_can_roll_back,
    check_draft_length,
    generate,
    room,
)

PREFILLS = ("whole", "last-alone")
"""The prompt in one go, or its last token in a pass of its own (the difference that was suspected first)."""

Event = dict[str, Any]
Params = dict[str, Any]


def unit_params(matrix: Mapping[str, Any]) -> list[tuple[str, Params]]:
    """Every unit of a matrix for one prompt on one arm: kind and the parameters beyond the base inputs.

    Args:
        matrix: :class:`hiraishin.profile.RunMatrix` as a dict.

    Returns:
        ``("plain", {"tokens", "prefill"})`` and ``("speculative", {"tokens", "prefill", "drafter", "draft_length",
        "client_guard", "repeat"})``, in running order; ``tokens`` is the limit. The reference of all is the plain
        decode after a whole prefill, so that one is there even if the matrix asks only for ``last-alone``.
    """
    prefills = [p for p in PREFILLS if p == "whole" or p in matrix["prefill"]]
    units: list[tuple[str, Params]] = []
    for prefill in prefills:
        common = {"tokens": matrix["tokens"], "prefill": prefill}
        units.append(("plain", dict(common)))
        if prefill in matrix["prefill"]:
            units.extend(
                (
                    "speculative",
                    {
                        **common,
                        "drafter": drafter_name(spec),
                        "draft_length": length,
                        "client_guard": guard,
                        "repeat": repeat,
                    },
                )
                for repeat in range(matrix["repeats"])
                for spec in matrix["drafters"]
                for guard in matrix["client_guard"]
                for length in matrix["draft_lengths"]
            )
    return units


def unit_name(kind: str, params: Mapping[str, Any]) -> str:
    """One text for a unit of :func:`unit_params`, for the ``wanted`` list of :func:`measure`."""
    return f"{kind} {canonical_json(dict(params))}"


def _per_second(run: Run) -> float | None:
    total = sum(run.seconds().values())
    return (len(run.tokens) - 1) / total if total > 0 else None


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def plain_record(done: Plain, whole: Plain, n_prompt: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Record and table of a ``plain`` unit; ``whole`` is the reference that it is compared with (maybe itself)."""
    run = done.run
    fork = first_difference(run.tokens, whole.run.tokens)
    seconds = run.seconds()
    record = {
        "prompt_tokens": n_prompt,
        "tokens": len(run.tokens),
        "token_ids": run.tokens,
        "text": _decoded(done.text),
        "text_sha256": hashlib.sha256(done.text).hexdigest(),
        "stopped": run.stopped,
        "rows_sha256": hashlib.sha256("".join(done.hashes).encode()).hexdigest(),
        "identical": fork is None,
        "first_differing_token": fork,
        "first_differing_byte": first_difference(done.text, whole.text),
        "smallest_margin": min(done.margins),
        "seconds": {**seconds, "decode": sum(seconds.values()), "prefill": done.prefill_s},
        "tokens_per_second": _per_second(run),
        "pass_ms": 1e3 * seconds["verify"] / len(run.cycles) if run.cycles else None,
    }
    times = [None, *(1e3 * (c.verify_s + c.bookkeeping_s) for c in run.cycles)]
    table: dict[str, list[Any]] = {
        "position": list(range(len(run.tokens))),
        "kv_position": [n_prompt - 1 + i for i in range(len(run.tokens))],
        "token": run.tokens,
        "margin": done.margins,
        "ms": times,
        "row_sha256": done.hashes,
    }
    return record, table


def _piece(session: Decoder, token: int) -> str:
    return _decoded(session.model.detokenize([token]))


def example_cycle(session: Decoder, run: Run) -> dict[str, Any] | None:
    """A real cycle to draw: the one with most kept guesses among those where one was also rejected.

    Cycles with no rejection come second, then those with nothing kept; ``None`` when nothing was drafted.
    """
    drafted = [c for c in run.cycles if c.drafts]
    if not drafted:
        return None
    best = max(drafted, key=lambda c: (c.accepted > 0 and c.accepted < len(c.drafts), c.accepted, -c.first))
    return {
        "before": _decoded(session.model.detokenize(run.tokens[: best.first])[-160:]),
        "n_past": best.n_past,
        "last": _piece(session, run.tokens[best.first - 1]),
        "drafts": [_piece(session, t) for t in best.drafts],
        "draft_ids": best.drafts,
        "emitted": [_piece(session, t) for t in best.emitted],
        "emitted_ids": best.emitted,
        "accepted": best.accepted,
        "width": best.width,
        "draft_ms": 1e3 * best.draft_s,
        "verify_ms": 1e3 * best.verify_s,
        "bookkeeping_ms": 1e3 * best.bookkeeping_s,
    }


def cycle_table(cycles: Sequence[Cycle]) -> dict[str, list[Any]]:
    """The raw log of a run: one row a cycle, times in milliseconds, tokens as lists of ids."""
    return {
        "cycle": list(range(len(cycles))),
        "first_token": [c.first for c in cycles],
        "n_past": [c.n_past for c in cycles],
        "width": [c.width for c in cycles],
        "drafted": [len(c.drafts) for c in cycles],
        "accepted": [c.accepted for c in cycles],
        "guarded": [c.guarded for c in cycles],
        "draft_ms": [1e3 * c.draft_s for c in cycles],
        "verify_ms": [1e3 * c.verify_s for c in cycles],
        "bookkeeping_ms": [1e3 * c.bookkeeping_s for c in cycles],
        "drafts": [c.drafts for c in cycles],
        "emitted": [c.emitted for c in cycles],
    }


def speculative_record(session: Decoder, run: Run, watch: RowWatch, n_prompt: int) -> dict[str, Any]:
    """The record of a ``speculative`` unit (:func:`evaluate_prompt` adds the fork and the prefill)."""
    reference, cycles = watch.plain, len(run.cycles)
    fork = first_difference(run.tokens, reference.run.tokens)
    text = session.model.detokenize(run.tokens)
    seconds = run.seconds()
    total = sum(seconds.values())
    widths = Counter(c.width for c in run.cycles)
    record: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "tokens": len(run.tokens),
        "token_ids": run.tokens,
        "stopped": run.stopped,
        "identical": fork is None,
        "first_differing_token": fork,
        "first_differing_byte": None if fork is None else first_difference(text, reference.text),
        "text": _decoded(text),
        "plain_text": None if fork is None else _decoded(reference.text),
        "rows_compared": watch.compared,
        "rows_differing": watch.differing,
        "max_abs_diff": watch.largest,
        "accepted": run.accepted,
        "drafted": run.drafted,
        "acceptance": run.accepted / run.drafted if run.drafted else None,
        "cycles": cycles,
        "guarded_cycles": sum(c.guarded for c in run.cycles),
        "tokens_per_cycle": (len(run.tokens) - 1) / cycles if cycles else None,
        "mean_width": sum(c.width for c in run.cycles) / cycles if cycles else None,
        "widths": {str(w): widths[w] for w in sorted(widths)},
        "seconds": {**seconds, "decode": total, "prefill": reference.prefill_s},
        "tokens_per_second": _per_second(run),
        "plain_tokens_per_second": _per_second(reference.run),
        "bookkeeping_share": seconds["bookkeeping"] / total if total > 0 else None,
        "example": example_cycle(session, run),
    }
    for part, spent in seconds.items():
        record[f"{part}_ms"] = 1e3 * spent / cycles if cycles else None
    return record


@dataclass
class Bench:
    """One prompt on one arm: the session, how to switch, and the drafters made so far.

    Args:
        session: the target's context.
        switch: turns the arm's switch on (``True``) or off, when a build has one.
        draft: gives a context over the draft model of a quant.
    """

    session: Decoder
    switch: Callable[[bool], None]
    draft: Callable[[str], Decoder]
    drafters: dict[str, Drafter] = field(default_factory=dict)

    def prefill(self, tokens: Sequence[int], prefill: str) -> tuple[Logits, float]:
        """An empty cache filled with the prompt, the switch off: float32 ``[n_vocab]`` and seconds."""
        self.switch(False)
        self.session.clear()
        began = time.perf_counter()
        row = self.session.prefill(tokens, last_alone=prefill == "last-alone")
        return row, time.perf_counter() - began

    def started(self, spec: Mapping[str, Any], tokens: Sequence[int], trace: Sequence[int]) -> tuple[Drafter, float]:
        """A drafter ready on the prompt (its prefill, too, with the switch off), and the seconds that took."""
        name = drafter_name(spec)
        if name not in self.drafters:
            self.drafters[name] = make_drafter(spec, target=self.session.model, trace=trace, draft=self.draft)
        self.switch(False)
        began = time.perf_counter()
        self.drafters[name].start(tokens)
        taken = time.perf_counter() - began
        self.switch(True)
        return self.drafters[name], taken


def evaluate_prompt(
    bench: Bench,
    tokens: Sequence[int],
    matrix: Mapping[str, Any],
    wanted: Collection[str] | None = None,
    *,
    survives: Callable[[int, int], bool] = operator.eq,
) -> Iterator[Event]:
    """All wanted units of one prompt on one arm, as events ``{"kind", "params", "record", "table"}``.

    ``survives`` is handed to :func:`hiraishin.speculative.generate`; only planted faults change it.

    Raises:
        UserError: an empty prompt, a draft length out of range, a model that cannot roll back, a draft of another
            vocabulary.
    """
    if not tokens:
        raise UserError("the prompt has no tokens", "A prompt needs at least one token.")
    units = [u for u in unit_params(matrix) if wanted is None or unit_name(*u) in wanted]
    session, limit, n_prompt = bench.session, matrix["tokens"], len(tokens)
    for _, params in units:
        if "draft_length" in params:
            check_draft_length(params["draft_length"])
    room(session, n_prompt, limit)
    specs = {drafter_name(spec): spec for spec in matrix["drafters"]}
    references: dict[str, Plain] = {}
    for prefill in PREFILLS:
        here = [u for u in units if u[1]["prefill"] == prefill]
        if not units or (not here and prefill != "whole"):
            continue
        row, prefill_s = bench.prefill(tokens, prefill)
        bench.switch(True)
        done = references[prefill] = record_plain(session, row, limit=limit, prefill_s=prefill_s)
        whole = references["whole"]
        for kind, params in here:
            if kind == "plain":
                record, table = plain_record(done, whole, n_prompt)
                yield {"kind": kind, "params": params, "record": record, "table": table}
                continue
            session.rollback(n_prompt)
            drafter, start_s = bench.started(specs[params["drafter"]], tokens, whole.run.tokens)
            watch = RowWatch(whole)
            run = generate(
                session,
                drafter,
                tokens,
                row,
                limit=limit,
                draft_length=params["draft_length"],
                client_guard=params["client_guard"],
                survives=survives,
                observe=watch,
            )
            record = speculative_record(session, run, watch, n_prompt)
            record["seconds"] |= {"prefill": prefill_s, "draft_prefill": start_s}
            record["plain_tokens_per_second"] = _per_second(done.run)
            record["identical_same_prefill"] = run.tokens == done.run.tokens
            record |= fork_record(session, run, watch, n_prompt)
            yield {"kind": kind, "params": params, "record": record, "table": cycle_table(run.cycles)}


_drafts: dict[str, Model] = {}
_probed: set[tuple[str, str]] = set()


def _draft_model(path: str, gpu_layers: int) -> Model:
    """The draft model at a path, kept loaded between prompts."""
    if path not in _drafts:
        _drafts[path] = Model(path, gpu_layers=gpu_layers)
    return _drafts[path]


def measure(
    *,
    model_path: str,
    draft_model_paths: Mapping[str, str],
    settings: Mapping[str, Any],
    switch: int,
    parts_off: int,
    prompt: Mapping[str, Any],
    matrix: Mapping[str, Any],
    wanted: Sequence[str] | None = None,
) -> Iterator[Event]:
    """Child: one prompt on one arm, with all of its drafters and draft lengths.

    Args:
        model_path: the target.
        draft_model_paths: the draft model of each quant that a drafter of kind ``model`` names.
        settings: threads, flash_attn, kv_type, n_batch, gpu_layers.
        switch, parts_off: the switch while decoding; every prefill runs with it off.
        prompt: ``{"id", "tokens"}``.
        matrix: :class:`hiraishin.profile.RunMatrix` as a dict.
        wanted: names (:func:`unit_name`) of the units to yield; all when ``None``.

    Yields:
        ``{"kind", "params", "record", "table"}``.

    Raises:
        UserError: see :func:`evaluate_prompt`; also a draft model that is not given.
    """
    tokens = list(prompt["tokens"])
    model = get_model(
        model_path, gpu_layers=settings.get("gpu_layers", 0), extra_bufts=settings.get("extra_bufts", True)
    )
    for path in [p for p in _drafts if p not in draft_model_paths.values()]:
        _drafts.pop(path).close()
    with ExitStack() as stack:

        def context(model: Model) -> Session:
            return stack.enter_context(
                Session(
                    model,
                    n_ctx=max(2, min(len(tokens) + matrix["tokens"], model.n_ctx_train)),
                    n_batch=settings.get("n_batch", 512),
                    threads=settings["threads"],
                    flash_attn=settings["flash_attn"],
                    kv_type=settings["kv_type"],
                )
            )

        def draft(quant: str) -> Session:
            if quant not in draft_model_paths:
                raise UserError(f"there is no draft model of quant {quant}", "The profile's drafter names it.")
            return context(_draft_model(draft_model_paths[quant], settings.get("gpu_layers", 0)))

        session = context(model)
        stack.callback(set_switch, SWITCH_OFF)
        set_switch(SWITCH_OFF)
        kind = (model_path, settings["kv_type"])
        if kind not in _probed:
            check_can_roll_back(session)
            _probed.add(kind)

        def turn(on: bool) -> None:
            set_switch(switch if on else SWITCH_OFF, parts_off)

        bench = Bench(session, turn, draft)
        before = fallbacks()
        for event in evaluate_prompt(bench, tokens, matrix, wanted):
            now = fallbacks()
            event["record"] |= {
                "switch_in_force": switch,
                "fallbacks": None if now is None or before is None else now - before,
            }
            before = now
            yield event
