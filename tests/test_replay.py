"""The replay's arithmetic: one wrong bit in one row is found, and nothing else is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from hiraishin import replay
from hiraishin.llama import Session

VOCABULARY = 64


class FakeModel:
    n_vocab = VOCABULARY


class FakeSession:
    """A model whose logits are a hash of all tokens so far: exact at every width, unless told to be wrong."""

    def __init__(self, wrong_at: int | None = None, bit: int = 0, from_width: int = 2) -> None:
        self.model = FakeModel()
        self.tokens: list[int] = []
        self.wrong_at, self.bit, self.from_width = wrong_at, bit, from_width
        self.widths: list[int] = []

    def _row(self, prefix: Sequence[int]) -> npt.NDArray[np.float32]:
        seed = int.from_bytes(hashlib.sha256(bytes(str(list(prefix)), "ascii")).digest()[:8], "little")
        return np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32)

    def decode(self, tokens: Sequence[int], *, logits: str = "all") -> npt.NDArray[np.float32]:
        self.widths.append(len(tokens))
        rows = []
        for token in tokens:
            self.tokens.append(token)
            row = self._row(self.tokens)
            if len(tokens) >= self.from_width and len(self.tokens) - 1 == self.wrong_at:
                row.view(np.uint32)[5] ^= np.uint32(1 << self.bit)
            rows.append(row)
        return np.stack(rows)

    def prefill(self, tokens: Sequence[int], **_: Any) -> npt.NDArray[np.float32]:
        return self.decode(tokens)[-1].copy()  # type: ignore[no-any-return]

    def rollback(self, n_past: int) -> None:
        del self.tokens[n_past:]


@pytest.fixture(autouse=True)
def _no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "set_switch", lambda value, parts_off=0: value)


def _run(session: FakeSession, width: int) -> dict[str, list[Any]]:
    real = cast(Session, session)
    trace = replay.record_trace(real, [1, 2, 3], 20)
    return replay.replay_once(real, trace, width)[0]


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 20])
def test_an_exact_model_differs_nowhere_at_any_width(width: int) -> None:
    session = FakeSession()
    columns = _run(session, width)
    assert not any(columns["differing"])
    replayed = session.widths[21:]
    assert replayed[:-1] == [width] * (len(replayed) - 1) and sum(replayed) == 20
    assert replay.summarize(columns, columns)["first_differing"] is None


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_wrong_bit_is_found_at_its_position(bit: int) -> None:
    columns = _run(FakeSession(wrong_at=10, bit=bit), 4)
    assert [i for i, d in enumerate(columns["differing"]) if d] == [7]
    record = replay.summarize(columns, None)
    assert (record["differing"], record["first_differing"], record["first_differing_kv"]) == (1, 7, 10)
    assert columns["row_sha256"][7] != columns["row_sha256"][6]
    assert columns["top_ids"][7] is not None and columns["top_ids"][6] is None


def test_a_difference_that_starts_at_a_width_is_not_seen_below_it() -> None:
    session = FakeSession(wrong_at=10, from_width=4)
    assert not any(_run(session, 3)["differing"])
    assert any(_run(FakeSession(wrong_at=10, from_width=4), 4)["differing"])


def test_noise_from_run_to_run_is_counted() -> None:
    clean, noisy = _run(FakeSession(), 4), _run(FakeSession(wrong_at=10), 4)
    assert replay.summarize(clean, noisy)["rerun_differing"] == 1
    assert replay.summarize(clean, clean)["rerun_differing"] == 0


def test_bits_are_compared_not_values() -> None:
    a = np.zeros((2, 3), np.float32)
    b = a.copy()
    b[1, 2] = -0.0
    assert replay.differing_rows(a, b).tolist() == [False, True]
    a[0, 0] = b[0, 0] = np.nan
    assert replay.differing_rows(a, b).tolist() == [False, True]


def test_rows_of_other_shape_or_type_are_refused() -> None:
    with pytest.raises(ValueError):
        replay.differing_rows(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError):
        replay.differing_rows(np.zeros((2, 3), np.float64), np.zeros((2, 3), np.float64))


def test_a_difference_that_is_not_finite_is_null_not_a_number() -> None:
    a = np.array([1, np.inf], np.float32)
    assert replay.largest_difference(a, np.array([1, 2], np.float32)) is None
    assert replay.largest_difference(np.array([1, 2], np.float32), np.array([1, 4], np.float32)) == 2.0
    assert replay.differences(np.array([1, 2], np.float32), np.array([1, 4], np.float32)) == (2.0, 2.0**0.5)
    assert replay.differences(a, np.array([1, 2], np.float32)) == (None, None)


def test_the_margin_is_top_1_minus_top_2() -> None:
    assert replay.margin(np.array([1.5, 4.0, 3.25], np.float32)) == 0.75
