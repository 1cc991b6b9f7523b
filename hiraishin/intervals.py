"""Exact intervals for counts and medians, from the binomial distribution alone (no normal approximation)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def _at_most(successes: int, trials: int, p: float) -> float:
    """P(X <= successes) of a binomial distribution."""
    if p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 1.0 if successes >= trials else 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    total = math.lgamma(trials + 1)
    return min(
        1.0,
        math.fsum(
            math.exp(total - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_p + (trials - k) * log_q)
            for k in range(successes + 1)
        ),
    )


def _root(falling: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def binomial_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share: it covers the true share with at least the given probability.

    >>> tuple(round(x, 3) for x in binomial_interval(45, 45))
    (0.921, 1.0)
    >>> tuple(round(x, 3) for x in binomial_interval(8, 24))
    (0.156, 0.553)

    Raises:
        ValueError: not ``0 <= successes <= trials`` with at least one trial.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} is no share")
    tail = (1 - level) / 2
    low = 0.0 if successes == 0 else _root(lambda p: _at_most(successes - 1, trials, p) - (1 - tail))
    high = 1.0 if successes == trials else _root(lambda p: _at_most(successes, trials, p) - tail)
    return low, high


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """An interval for the median from two order statistics, whatever the distribution; ``None`` with too few values.

    The number of values below the true median is binomial with p = 1/2.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    >>> median_interval([1.0, 2.0, 3.0]) is None
    True
    """
    count, tail = len(values), (1 - level) / 2
    below = -1
    while below + 1 < count / 2 and _at_most(below + 1, count, 0.5) <= tail:
        below += 1
    if below < 0:
        return None
    ordered = sorted(values)
    return ordered[below], ordered[count - 1 - below]
