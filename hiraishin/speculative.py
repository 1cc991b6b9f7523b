"""The exact speculative loop, greedy: a drafter guesses, one pass of the target checks, and a guess survives only
if it equals the target's own argmax at that position.

Every token that comes out is therefore the target's pick, and the text equals plain decoding under one condition:
the target's logits for a position inside a pass equal its logits for that position decoded alone. Stock kernels
break it, this loop does not repair it, and :mod:`hiraishin.evaluate` counts how often it shows.

A cycle: the drafter proposes up to ``draft_length`` tokens; the verify pass holds the last token and the guesses
(so it is at most 16 wide); the rows' argmaxes are compared with the guesses; the cache forgets what was rejected.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hiraishin.errors import UserError
from hiraishin.llama import Logits

MAX_DRAFT = 15
"""The most guesses of a cycle: with the last token they make a verify pass of 16."""

GUARD = 256
"""llama.cpp rounds the attended range up to a multiple of this many cells."""


class Target(Protocol):
    """What the loop needs to know of a model (:class:`hiraishin.llama.Model`)."""

    n_vocab: int
    n_ctx_train: int
    path: Path

    @property
    def can_roll_back(self) -> bool:
        """Whether the cache has positions that can be removed."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends generation."""

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes that the tokens stand for."""


class Decoder(Protocol):
    """What the loop needs of a context (:class:`hiraishin.llama.Session`)."""

    n_ctx: int
    n_batch: int
    n_past: int

    @property
    def model(self) -> Target:
        """The model behind the context."""

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, logits: str = "all") -> Logits:
        """One pass; a row of logits a token, valid until the next pass."""

    def prefill(self, tokens: Sequence[int], *, last_alone: bool = False) -> Logits:
        """Fill the cache with a prompt; a copy of the logits after its last token."""

    def rollback(self, n_past: int) -> None:
        """Forget every token from a position on, or raise."""

    def clear(self) -> None:
        """Empty the cache."""


class Drafter(Protocol):
    """A way to guess. ``name`` is its canonical description."""

    name: str

    def start(self, prompt: Sequence[int]) -> None:
        """Get ready for a new run over this prompt (not counted as drafting)."""

    def propose(self, sequence: Sequence[int], most: int) -> list[int]:
        """At most ``most`` guesses of what follows ``sequence`` (the prompt and all tokens so far).

        Within a run, ``sequence`` only ever grows. An empty list is a valid answer.
        """


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle. ``first`` is the index of its first token in the output, ``n_past`` the cells before the pass."""

    first: int
    n_past: int
    drafts: list[int]
    emitted: list[int]
    accepted: int
    guarded: bool
    draft_s: float
    verify_s: float
    bookkeeping_s: float

    @property
    def width(self) -> int:
        """Tokens in the verify pass."""
        return 1 + len(self.drafts)


@dataclass
class Run:
    """What a decode gave: tokens (an end token included), why it stopped, and its cycles.

    The first token comes from the prefill's logits, so cycles gave ``len(tokens) - 1``. ``stopped`` is ``end``,
    ``limit`` (as many tokens as asked for) or ``context`` (the cache is full).
    """

    tokens: list[int]
    stopped: str = "limit"
    cycles: list[Cycle] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        """Guesses that were verified."""
        return sum(len(c.drafts) for c in self.cycles)

    @property
    def accepted(self) -> int:
        """Guesses that survived."""
        return sum(c.accepted for c in self.cycles)

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each part of the cycles."""
        return {
            "draft": sum(c.draft_s for c in self.cycles),
            "verify": sum(c.verify_s for c in self.cycles),
            "bookkeeping": sum(c.bookkeeping_s for c in self.cycles),
        }


Observer = Callable[[int, Logits, Sequence[int]], None]
"""Called with the index of the first token, the rows that chose tokens (``[n, n_vocab]``), and those tokens."""


def check_draft_length(draft_length: int) -> None:
    """Refuse what makes no verify pass of 2 to 16 tokens.

    Raises:
        UserError: the length is not in 1 to 15.
    """
    if not 1 <= draft_length <= MAX_DRAFT:
        raise UserError(
            f"a draft length of {draft_length} is not possible",
            f"Between 1 and {MAX_DRAFT}: a verify pass holds the last token and the guesses, 16 tokens at most.",
        )


def check_can_roll_back(session: Decoder) -> None:
    """Refuse a model whose cache cannot forget, before anything is decoded for a result.

    Recurrent and hybrid models are known by their kind. Others are tried: two tokens in, one out.

    Raises:
        UserError: naming the model.
    """
    if not session.model.can_roll_back:
        raise UserError(
            f"{session.model.path.name} is a recurrent or hybrid model: its state cannot be rolled back",
            "Speculative decoding must forget rejected tokens; use a model with a plain KV cache.",
        )
    session.clear()
    session.decode([0], logits="none")
    session.decode([0], logits="none")
    session.rollback(1)
    session.clear()


def room(session: Decoder, n_prompt: int, limit: int) -> int:
    """How many tokens can be generated: the limit, or what the context holds.

    The last token is never fed, so a context of ``n`` cells gives ``n - n_prompt + 1`` tokens.

    Raises:
        UserError: the limit is below 1, or the prompt alone is longer than the context.
    """
    if limit < 1:
        raise UserError(f"{limit} tokens cannot be generated", "Ask for at least one.")
    context = min(session.n_ctx, session.model.n_ctx_train)
    if n_prompt > context:
        raise UserError(f"a prompt of {n_prompt} tokens does not fit in a context of {context}")
    return min(limit, context - n_prompt + 1)


def _finish(run: Run, session: Decoder, limit: int) -> Run:
    if session.model.is_end(run.tokens[-1]):
        run.stopped = "end"
    elif len(run.tokens) < limit:
        run.stopped = "context"
    return run


def plain(session: Decoder, row: Logits, *, limit: int, observe: Observer | None = None) -> Run:
    """Decode greedily, one token a pass, until an end token, the limit or the end of the context.

    Args:
        session: its cache holds the prompt and nothing else.
        row: float32 ``[n_vocab]``, the logits after the prompt.
        limit: most tokens to generate.
        observe: sees each row and the token it chose, between the timed passes.

    Returns:
        the run; a pass counts as a cycle without guesses, its argmax and end check as bookkeeping.
    """
    n_prompt, most = session.n_past, room(session, session.n_past, limit)
    is_end = session.model.is_end
    run = Run([int(row.argmax())])
    if observe is not None:
        observe(0, row[None], run.tokens)
    ended = is_end(run.tokens[0])
    while not ended and len(run.tokens) < most:
        first = len(run.tokens)
        began = time.perf_counter()
        rows = session.decode(run.tokens[-1:])
        decoded = time.perf_counter()
        token = int(rows[0].argmax())
        run.tokens.append(token)
        ended = is_end(token)
        done = time.perf_counter()
        run.cycles.append(
            Cycle(first, n_prompt + first - 1, [], [token], 0, False, 0.0, decoded - began, done - decoded)
        )
        if observe is not None:
            observe(first, rows, [token])
    return _finish(run, session, limit)


def generate(
    session: Decoder,
    drafter: Drafter,
    prompt: Sequence[int],
    row: Logits,
    *,
    limit: int,
    draft_length: int,
    client_guard: bool = False,
    survives: Callable[[int, int], bool] = operator.eq,
    observe: Observer | None = None,
) -> Run:
    """Decode greedily with guesses.

    Args:
        session: the target; its cache holds exactly ``prompt``.
        drafter: started on the same prompt.
        prompt: the prompt's tokens.
        row: float32 ``[n_vocab]``, the logits after the prompt.
        limit: most tokens to generate; never exceeded, nor is the context.
        draft_length: most guesses of a cycle, 1 to 15.
        client_guard: shorten verify passes so that none crosses a multiple of 256 cells.
        survives: whether a guess is kept, given the target's pick. Anything but equality makes the output wrong;
            it is an argument so that the evaluation can be shown to notice.
        observe: sees the rows and tokens of each cycle, outside of all timing.

    Returns:
        the run. The cache holds the prompt and all tokens but the last.

    Raises:
        UserError: draft length out of range, prompt too long, or the cache could not be rolled back.
        ValueError: the drafter broke its contract (too many guesses, a token outside the vocabulary).
    """
    check_draft_length(draft_length)
    if session.n_past != len(prompt):
        raise ValueError(f"the cache holds {session.n_past} tokens, the prompt {len(prompt)}")
    most = room(session, len(prompt), limit)
    is_end, n_vocab = session.model.is_end, session.model.n_vocab
    run = Run([int(row.argmax())])
    if observe is not None:
        observe(0, row[None], run.tokens)
    tokens, sequence = run.tokens, [*prompt, run.tokens[0]]
    ended = is_end(tokens[0])
    while not ended and len(tokens) < most:
        began = time.perf_counter()
        first, n_past = len(tokens), session.n_past
        # A pass gives one token more than it has guesses; none may lie past the limit or the context.
        allowed = min(draft_length, most - first - 1)
        guarded = client_guard and allowed > GUARD - 1 - n_past % GUARD
        if guarded:
            allowed = GUARD - 1 - n_past % GUARD
        ready = time.perf_counter()
        drafts = drafter.propose(sequence, allowed) if allowed else []
        guessed = time.perf_counter()
        if len(drafts) > allowed or any(not 0 <= d < n_vocab for d in drafts):
            raise ValueError(f"{drafter.name} proposed {drafts}, allowed were {allowed} tokens of {n_vocab}")
        checked = time.perf_counter()
        rows = session.decode([tokens[-1], *drafts])
        verified = time.perf_counter()
        emitted: list[int] = []
        accepted = 0
        for index in range(len(drafts) + 1):
            pick = int(rows[index].argmax())
            kept = index < len(drafts) and survives(drafts[index], pick)
            emitted.append(drafts[index] if kept else pick)
            accepted += kept
            ended = is_end(emitted[-1])
            if ended or not kept:
                break
        # What was fed and is part of the output: the last token and all of this cycle's but the newest.
        session.rollback(n_past + len(emitted))
        tokens.extend(emitted)
        sequence.extend(emitted)
        done = time.perf_counter()
        run.cycles.append(
            Cycle(
                first,
                n_past,
                drafts,
                emitted,
                accepted,
                guarded,
                guessed - ready,
                verified - checked,
                (ready - began) + (checked - guessed) + (done - verified),
            )
        )
        if observe is not None:
            observe(first, rows, emitted)
    return _finish(run, session, limit)
