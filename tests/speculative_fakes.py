"""A model and a context made of numpy, with the interface of the native ones: every logit row is a hash's doing.

A row depends on every token in the cache, so a token that should have been forgotten shows at once; and it leans
towards a successor of the last token, so that guesses can be right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hiraishin.errors import UserError

Row = npt.NDArray[np.float32]


class FakeModel:
    """A vocabulary of ``n_vocab`` tokens. ``spread`` is how far a row may lean away from the habitual successor."""

    def __init__(
        self,
        *,
        n_vocab: int = 64,
        ends: Sequence[int] = (),
        n_ctx_train: int = 4096,
        spread: float = 1.5,
        seed: int = 0,
        can_roll_back: bool = True,
        name: str = "fake.gguf",
    ) -> None:
        self.n_vocab = n_vocab
        self.n_ctx_train = n_ctx_train
        self.path = Path(name)
        self.ends = set(ends)
        self.spread = spread
        self.seed = seed
        self._can_roll_back = can_roll_back

    @property
    def can_roll_back(self) -> bool:
        return self._can_roll_back

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(f"<{t}>".encode() for t in tokens if t not in self.ends)

    def row(self, state: int) -> Row:
        return _row(self.n_vocab, self.spread, self.seed, state).copy()


@functools.lru_cache(maxsize=100_000)
def _row(n_vocab: int, spread: float, seed: int, state: int) -> Row:
    last = state % n_vocab
    logits = np.random.default_rng([seed, state]).normal(0.0, spread, n_vocab)
    logits[(last * 7 + 3) % 12] += 6.0
    return logits.astype(np.float32)


class FakeSession:
    """A context. ``noise`` is added to every row of a pass wider than one, as a kernel of another order would.

    ``forgetful=False`` makes a rollback that leaves the newest rejected token behind (a broken cache), and
    ``rolls=False`` one that says so.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        n_ctx: int = 512,
        n_batch: int = 512,
        noise: float = 0.0,
        forgetful: bool = True,
        rolls: bool = True,
    ) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.noise = noise
        self.forgetful = forgetful
        self.rolls = rolls
        self.states: list[int] = []
        self.widths: list[int] = []
        self.rollbacks = 0
        self.switches: list[bool] = []
        self.on = False

    @property
    def n_past(self) -> int:
        return len(self.states)

    @n_past.setter
    def n_past(self, value: int) -> None:
        raise AssertionError("only passes and rollbacks move the cache")

    def switch(self, on: bool) -> None:
        self.on = on

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, logits: str = "all") -> Row:
        assert 1 <= len(tokens) <= self.n_batch
        assert self.n_past + len(tokens) <= self.n_ctx
        self.widths.append(len(tokens))
        self.switches.append(self.on)
        rows = []
        for token in tokens:
            assert 0 <= token < self.model.n_vocab
            before = self.states[-1] if self.states else 1
            mixed = (before * 6364136223846793005 + int(token) * 1442695040888963407 + 1) % (1 << 60)
            self.states.append(mixed - mixed % self.model.n_vocab + int(token))
            row = self.model.row(self.states[-1])
            if self.noise and len(tokens) > 1:
                random = np.random.default_rng([len(tokens), self.states[-1]])
                row = (row + random.uniform(-self.noise, self.noise, len(row))).astype(np.float32)
            rows.append(row)
        kept = {"all": rows, "last": rows[-1:], "none": []}[logits]
        return np.array(kept, np.float32).reshape(len(kept), self.model.n_vocab)

    def prefill(self, tokens: Sequence[int], *, last_alone: bool = False) -> Row:
        body = list(tokens[:-1]) if last_alone and len(tokens) > 1 else list(tokens)
        assert not self.on
        for start in range(0, len(body), self.n_batch):
            rows = self.decode(body[start : start + self.n_batch], logits="last")
        if len(body) < len(tokens):
            rows = self.decode(tokens[-1:], logits="last")
        return np.array(rows[0])

    def rollback(self, n_past: int) -> None:
        assert 0 <= n_past <= self.n_past
        if n_past == self.n_past:
            return
        self.rollbacks += 1
        if not self.rolls:
            raise UserError(f"the KV cache of {self.model.path.name} cannot be rolled back to position {n_past}")
        newest = self.states[-1]
        del self.states[n_past:]
        if not self.forgetful and self.states:
            self.states[-1] = newest - newest % self.model.n_vocab + self.states[-1] % self.model.n_vocab

    def clear(self) -> None:
        self.states.clear()

    def close(self) -> None:
        return


def matrix(**changes: Any) -> dict[str, Any]:
    """A run matrix as a dict, through the profile's own validation."""
    from hiraishin.profile import RunMatrix

    return RunMatrix.model_validate({"name": "test", "tokens": 40, **changes}).model_dump()
