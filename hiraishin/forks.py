"""Where a run leaves the plain decode, and why: the plain decode's rows, a watch over a run's, and a control.

A fork is *rounding* when two things hold. The token that came out is the argmax of the row that the verify pass
computed. And a control gives the same row bit for bit: passes of the same widths at the same places, but fed with
the recorded tokens and rolled back by their count, without drafter, acceptance or loop. Then nothing but the shape
of the passes separates that row from the plain one. Everything else is *logic*: a guess kept that should not be,
or a cache that held something else than the output. The numbers agree with the name: a rounding fork's gap between
the plain pick and the token that came out is at most twice the row's largest difference, a planted wrong accept
lies where it is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiraishin.llama import Logits
from hiraishin.replay import differing_rows, largest_difference, margin, row_sha256
from hiraishin.speculative import Cycle, Decoder, Run, plain, room


@dataclass
class Plain:
    """A plain decode with its rows: ``rows[i]`` chose ``run.tokens[i]``."""

    run: Run
    rows: Logits
    margins: list[float]
    hashes: list[str]
    text: bytes
    prefill_s: float


@dataclass
class Fork:
    """The first token that differs from the plain decode's, and the row that the run had there."""

    token: int
    width: int
    emitted: int
    row: Logits
    row_diff: float | None

    @property
    def argmax(self) -> int:
        """What the run's own row says."""
        return int(self.row.argmax())


@dataclass
class RowWatch:
    """Compares the rows of a run with the plain decode's, up to the first token that differs.

    It is called between the timed parts of cycles. ``largest`` is ``None`` once a difference was not finite.
    """

    plain: Plain
    compared: int = 0
    differing: int = 0
    largest: float | None = 0.0
    fork: Fork | None = None

    def __call__(self, first: int, rows: Logits, tokens: Sequence[int]) -> None:
        """Take the rows and tokens of one cycle."""
        for offset, token in enumerate(tokens):
            index = first + offset
            if self.fork is not None or index >= len(self.plain.run.tokens):
                return
            row, was = rows[offset], self.plain.rows[index]
            difference: float | None = 0.0
            self.compared += 1
            if differing_rows(row[None], was[None])[0]:
                self.differing += 1
                difference = largest_difference(row, was)
                self.largest = None if difference is None or self.largest is None else max(self.largest, difference)
            if token != self.plain.run.tokens[index]:
                self.fork = Fork(index, len(rows), token, row.copy(), difference)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first element that differs (or that only one has); ``None`` when equal.

    >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference(b"ab", b"abc"), first_difference([1], [1])
    (2, 2, None)
    """
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def record_plain(session: Decoder, row: Logits, *, limit: int, prefill_s: float) -> Plain:
    """Decode plainly and keep every row.

    Args:
        session: its cache holds the prompt alone.
        row: float32 ``[n_vocab]``, the logits after the prompt.
        limit: most tokens to generate.
        prefill_s: what the prefill took, to be passed on.
    """
    rows = np.empty((room(session, session.n_past, limit), session.model.n_vocab), np.float32)

    def keep(first: int, seen: Logits, _: Sequence[int]) -> None:
        rows[first] = seen[0]

    run = plain(session, row, limit=limit, observe=keep)
    rows = rows[: len(run.tokens)]
    return Plain(
        run,
        rows,
        [margin(r) for r in rows],
        [row_sha256(r) for r in rows],
        session.model.detokenize(run.tokens),
        prefill_s,
    )


def control_row(
    session: Decoder, recorded: Sequence[int], cycles: Sequence[Cycle], n_prompt: int, token: int
) -> Logits | None:
    """The row for output ``token``, from the recorded tokens in passes of the run's widths at the run's places.

    Args:
        session: the prompt's ``n_prompt`` cells lie at the front of its cache.
        recorded: the plain decode's tokens.
        cycles: the run's, of which widths and numbers of tokens are used, and the guesses that came to nothing
            (they are no part of the rows before them, but a pass should hold what it held).
        token: index of the output token whose row is wanted.

    Returns:
        a copy, float32 ``[n_vocab]``; ``None`` for token 0, whose row is the prefill's, or one beyond the cycles.
    """
    session.rollback(n_prompt)
    for cycle in cycles:
        start = cycle.first - 1
        piece = list(recorded[start : start + 1 + cycle.accepted])
        rows = session.decode([*piece, *cycle.drafts[len(piece) - 1 :]])
        if cycle.first <= token < cycle.first + len(cycle.emitted):
            return np.array(rows[token - cycle.first])
        session.rollback(n_prompt + start + len(cycle.emitted))
    return None


def fork_kind(fork: Fork, control: Logits | None) -> str:
    """``rounding`` or ``logic`` (see the module's text). Without a control row, the prefill's own row is meant."""
    reproduced = control is None or not differing_rows(control[None], fork.row[None])[0]
    return "rounding" if reproduced and fork.emitted == fork.argmax else "logic"


def fork_record(session: Decoder, run: Run, watch: RowWatch, n_prompt: int) -> dict[str, Any]:
    """What is known about a run's fork; all ``None`` without one.

    Returns:
        ``fork_kind``, ``fork_width`` (of the pass), ``fork_kv_position`` (of the row's token), ``margin_there``
        (top two logits of the plain row), ``gap_there`` (the plain pick's logit minus that of the token that came
        out, in the plain row), ``row_diff`` (the run's row against the plain row), ``control_diff`` (the run's row
        against the control's; 0 when it was reproduced).
    """
    keys = ("fork_kind", "fork_width", "fork_kv_position", "margin_there", "gap_there", "row_diff", "control_diff")
    reference, seen = watch.plain, watch.fork
    index = first_difference(run.tokens, reference.run.tokens)
    if index is None:
        return dict.fromkeys(keys)
    if seen is None or seen.token != index:
        # One output ended where the other went on, or a token came out that no row was seen to choose.
        return {**dict.fromkeys(keys), "fork_kind": "logic"}
    control = control_row(session, reference.run.tokens, run.cycles, n_prompt, index)
    row = reference.rows[index]
    values = (
        fork_kind(seen, control),
        seen.width,
        n_prompt - 1 + index,
        reference.margins[index],
        float(row[reference.run.tokens[index]]) - float(row[seen.emitted]),
        seen.row_diff,
        0.0 if control is None else largest_difference(control, seen.row),
    )
    return dict(zip(keys, values, strict=True))
