"""Student's t-intervals of means over seeds, and Holm's correction for many of them."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

LEVEL = 0.95
LEAST_SEEDS = 5
"""Fewer values give an interval, but no verdict."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """A mean and where its true value lies. level: of confidence, between 0 and 1."""

    mean: float
    low: float
    high: float
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the mean of two values or more, taken as independent draws of one normal distribution."""
    from scipy.special import stdtrit

    mean = statistics.mean(values)
    quantile = float(stdtrit(len(values) - 1, (1 + level) / 2))
    half = quantile * statistics.stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half, level)


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % t-interval of the mean."""
    interval = t_interval(values)
    return interval.high - interval.mean


def p_value(values: Sequence[float], margin: float) -> float:
    """Of the two-sided t-test that the mean is the margin."""
    from scipy.special import stdtr

    error = statistics.stdev(values) / sqrt(len(values))
    distance = abs(statistics.mean(values) - margin)
    if error == 0:
        return float(distance == 0)
    return float(2 * stdtr(len(values) - 1, -distance / error))


def holm(tests: Mapping[Key, tuple[Sequence[float], float]]) -> dict[Key, Interval]:
    """An interval for each test that excludes the test's margin if Holm's procedure rejects it.

    tests: the values of each, and its margin. The smallest of m p-values is held against (1 - LEVEL) / m, the
    next against (1 - LEVEL) / (m - 1), and so on to the first that is not below; from there on none is
    rejected (Holm 1979, Scandinavian Journal of Statistics 6). The chance of any false rejection among them
    is at most 1 - LEVEL. Each interval has the level at which its test was decided.
    """
    p = {key: p_value(values, margin) for key, (values, margin) in tests.items()}
    found, rejecting, share = {}, True, 1.0
    for place, key in enumerate(sorted(tests, key=lambda key: p[key])):
        if rejecting:
            share = (1 - LEVEL) / (len(tests) - place)
            rejecting = p[key] < share
        found[key] = t_interval(tests[key][0], 1 - share)
    return found
