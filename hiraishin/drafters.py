"""Ways to guess what comes next, behind :class:`hiraishin.speculative.Drafter`.

A draft model costs passes of its own, prompt lookup costs nothing and knows only what was said before, and the
replayed drafter knows the answer: with an acceptance rate of 1 it is the perfect drafter, and with another rate it
stands in for a trained draft where there is none (a synthetic shape).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hiraishin.errors import UserError
from hiraishin.llama import Logits, Model
from hiraishin.speculative import Decoder, Drafter, Target


def drafter_name(spec: Mapping[str, Any]) -> str:
    """The canonical description of a profile's drafter: one text for one way to guess.

    Fields that a kind does not use leave no trace, so changing them does not make another measurement.

    >>> drafter_name({"kind": "model", "quant": "Q2_K", "margin": 3.0})
    'model Q2_K, margin 3'
    >>> drafter_name({"kind": "model", "quant": "Q2_K", "margin": 0})
    'model Q2_K, no margin'
    >>> drafter_name({"kind": "lookup", "ngram": 3})
    'lookup, 3-grams'
    >>> drafter_name({"kind": "replayed", "acceptance": 0.773, "seed": 1})
    'replayed, acceptance 0.773, seed 1'

    Raises:
        ValueError: the kind is unknown.
    """
    match spec["kind"]:
        case "model":
            margin = spec.get("margin")
            return f"model {spec['quant']}, " + (f"margin {margin:g}" if margin else "no margin")
        case "lookup":
            return f"lookup, {spec['ngram']}-grams"
        case "replayed":
            return f"replayed, acceptance {spec['acceptance']:g}, seed {spec['seed']}"
    raise ValueError(f"there is no drafter {spec['kind']!r}")


class ModelDrafter:
    """A draft model that runs ahead greedily.

    Its cache follows the output: what it guessed and was kept stays, the rest is rolled back. It stops when its
    own top two logits are closer than ``margin`` (0 or ``None``: never), after an end token, or at the most.

    Args:
        session: a context over the draft model, at least as long as the target's.
        target: the model whose output is guessed.
        name: canonical description.
        margin: smallest gap of the top two logits at which the draft's pick is proposed.

    Raises:
        UserError: the vocabularies differ, or the draft's cache cannot forget.
    """

    def __init__(self, session: Decoder, target: Target, *, name: str, margin: float | None) -> None:
        check_vocabulary(session.model, target)
        if not session.model.can_roll_back:
            raise UserError(
                f"the draft {session.model.path.name} is a recurrent or hybrid model: its state cannot be rolled back",
                "Use a draft with a plain KV cache.",
            )
        self.name = name
        self.session = session
        self.margin = margin or 0.0
        self._prompt: list[int] | None = None
        self._base = 0
        self._ahead: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """Fill the draft's cache with the prompt, or return to it."""
        if self._prompt == list(prompt):
            self.session.rollback(len(prompt))
        else:
            self._prompt = None
            self.session.clear()
            self.session.prefill(prompt)
            self._prompt = list(prompt)
        self._base = len(prompt)
        self._ahead = []

    def propose(self, sequence: Sequence[int], most: int) -> list[int]:
        """Feed what is new, then guess token by token."""
        new = list(sequence[self._base :])
        known = 0
        # The last token is always fed: its row is the first guess.
        while known < min(len(self._ahead), len(new) - 1) and self._ahead[known] == new[known]:
            known += 1
        self.session.rollback(self._base + known)
        todo = new[known:]
        for start in range(0, len(todo), self.session.n_batch):
            row = self.session.decode(todo[start : start + self.session.n_batch], logits="last")[0]
        self._base = len(sequence)
        self._ahead = []
        guesses: list[int] = []
        while True:
            pick, gap = top_two(row)
            if gap < self.margin:
                break
            guesses.append(pick)
            if len(guesses) >= most or self.session.model.is_end(pick):
                break
            row = self.session.decode([pick], logits="last")[0]
            self._ahead.append(pick)
        return guesses


def top_two(row: Logits) -> tuple[int, float]:
    """The argmax of a row and how far its logit lies above the second (two passes over the row, no sort)."""
    pick = int(row.argmax())
    top = float(row[pick])
    row[pick] = -np.inf  # restored at once; a partition of 150k logits costs ten times as much
    second = float(row.max())
    row[pick] = top
    return pick, top - second


class LookupDrafter:
    """Prompt lookup: find the latest earlier place where the last tokens stood, and guess what followed there.

    At least ``ngram`` tokens must match, and one token is guessed for every two that do: a short match is often
    chance, and on a CPU a rejected guess costs nearly as much as a token. When the match overlaps the end, the
    guess goes on periodically.
    """

    def __init__(self, *, name: str, ngram: int) -> None:
        self.name = name
        self.ngram = ngram
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Index the prompt's n-grams."""
        self._after = {}
        self._indexed = self.ngram - 1
        self._index(prompt)

    def _index(self, sequence: Sequence[int]) -> None:
        # n-grams that end before the last token: only they have a known successor.
        for end in range(self._indexed + 1, len(sequence)):
            self._after[tuple(sequence[end - self.ngram : end])] = end
        self._indexed = max(self._indexed, len(sequence) - 1)

    def propose(self, sequence: Sequence[int], most: int) -> list[int]:
        """Copy from the latest match."""
        self._index(sequence)
        count = len(sequence)
        found = self._after.get(tuple(sequence[count - self.ngram :])) if count > self.ngram else None
        if found is None:
            return []
        matched = self.ngram
        while matched < min(2 * most, found) and sequence[found - matched - 1] == sequence[count - matched - 1]:
            matched += 1
        guesses: list[int] = []
        for position in range(found, found + min(most, max(1, matched // 2))):
            guesses.append(sequence[position] if position < count else guesses[position - count])
        return guesses


class ReplayedDrafter:
    """Guesses the recorded plain decode, each token right with probability ``acceptance``.

    Whether a position's guess is right is drawn once, from the seed; it guesses no further than its first wrong
    token, so the share of accepted guesses is the chosen rate in expectation, at any draft length.
    """

    def __init__(self, trace: Sequence[int], *, name: str, acceptance: float, seed: int, n_vocab: int) -> None:
        self.name = name
        coins = random.Random(f"hiraishin {seed}")
        self._right = [coins.random() < acceptance for _ in trace]
        self._guess = [t if right else (t + 1) % n_vocab for t, right in zip(trace, self._right, strict=True)]
        self._offset = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Remember where the output begins."""
        self._offset = len(prompt)

    def propose(self, sequence: Sequence[int], most: int) -> list[int]:
        """The recorded tokens at the coming positions, up to and with the first wrong one."""
        start = len(sequence) - self._offset
        for position in range(start, min(start + most, len(self._guess))):
            if not self._right[position]:
                return self._guess[start : position + 1]
        return self._guess[start : start + most]


def make_drafter(
    spec: Mapping[str, Any], *, target: Target, trace: Sequence[int], draft: Callable[[str], Decoder]
) -> Drafter:
    """A profile's drafter.

    Args:
        spec: fields of :class:`hiraishin.profile.Drafter`.
        target: the model whose output is guessed.
        trace: the plain decode's tokens, for the replayed drafter.
        draft: gives a context over the draft model of a quant.
    """
    name = drafter_name(spec)
    if spec["kind"] == "model":
        return ModelDrafter(draft(spec["quant"]), target, name=name, margin=spec.get("margin"))
    if spec["kind"] == "lookup":
        return LookupDrafter(name=name, ngram=spec["ngram"])
    return ReplayedDrafter(trace, name=name, acceptance=spec["acceptance"], seed=spec["seed"], n_vocab=target.n_vocab)


def vocabulary_sha256(model: Target) -> str:
    """Hash over every token's text; equal for models that share a vocabulary."""
    known = getattr(model, "_vocabulary_sha256", None)
    if isinstance(known, str):
        return known
    digest = hashlib.sha256(f"{model.n_vocab}".encode())
    if isinstance(model, Model) and model.native.llama_vocab_type(model.vocab) != 0:  # 0: no tokenizer, no texts
        for token in range(model.n_vocab):
            text = model.native.llama_vocab_get_text(model.vocab, token) or b""
            digest.update(len(text).to_bytes(4, "little") + text)
    value = digest.hexdigest()
    if isinstance(model, Model):
        model._vocabulary_sha256 = value  # type: ignore[attr-defined]
    return value


def check_vocabulary(draft: Target, target: Target) -> None:
    """Refuse a draft whose tokens mean something else.

    Raises:
        UserError: naming both models and what differs.
    """
    names = f"the draft {draft.path.name} and the target {target.path.name}"
    hint = "Use a draft of the target's own family, or prompt lookup, which needs none."
    if draft.n_vocab != target.n_vocab:
        raise UserError(f"{names} have vocabularies of {draft.n_vocab} and {target.n_vocab} tokens", hint)
    if vocabulary_sha256(draft) != vocabulary_sha256(target):
        raise UserError(f"{names} have vocabularies of one size with other tokens", hint)
