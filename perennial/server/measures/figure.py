"""A measure with its 95 % interval, and the interval of a share."""

from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict

Z = 1.959963984540054
"""Standard normal quantile of 97.5 %."""


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)


Number = Annotated[float | None, AfterValidator(_finite)]


class Figure(BaseModel):
    """value, and the 95 % interval from low to high; all None where nothing was measured."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    value: Number = None
    low: Number = None
    high: Number = None

    def interval(self, factor: float, digits: int) -> str:
        """The interval as '[81, 92]', times factor, with so many digits; '' if there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"[{factor * self.low:.{digits}f}, {factor * self.high:.{digits}f}]"


UNMEASURED = Figure()


def wilson(successes: int, trials: int, z: float = Z) -> Figure:
    """A share with its score interval, which holds its level also for few trials and for shares of 0 or 1.

    Wilson 1927 (doi 10.1080/01621459.1927.10502953).
    """
    if trials <= 0:
        return UNMEASURED
    # SciPy has it too, for an import that takes longer than a small run's last task
    share, square = successes / trials, z * z
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * np.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Figure(value=share, low=min(low, share), high=max(high, share))


def logit_interval(value: float, error: float, fallback_trials: int, z: float = Z) -> Figure:
    """A figure between 0 and 1 with an interval that is symmetric in its log odds.

    error: standard error of the value. fallback_trials: where the value is 0 or 1, or error is 0, the
    interval is as wide as Wilson's of so many trials, because one of width 0 would not be honest.
    """
    if not 0 < value < 1 or error <= 0:
        interval = wilson(0, fallback_trials, z)
        if interval.high is None:
            return Figure(value=value)
        width = interval.high
        return Figure(value=value, low=max(0.0, value - width), high=min(1.0, value + width))
    centre, spread = np.log(value / (1 - value)), z * error / (value * (1 - value))
    low, high = 1 / (1 + np.exp(-(centre - spread))), 1 / (1 + np.exp(-(centre + spread)))
    return Figure(value=value, low=float(low), high=float(high))


def mean_of(figures: list[Figure]) -> Figure:
    """The mean of figures of the same samples, with an interval that is not too narrow however they depend.

    The standard deviation of a mean is at most the mean of the standard deviations, so the mean of the lower
    and of the upper ends is used. Unmeasured ones make the mean unmeasured.
    """
    values = [(figure.value, figure.low, figure.high) for figure in figures]
    known = [(value, low, high) for value, low, high in values if None not in (value, low, high)]
    if not known or len(known) < len(figures):
        return UNMEASURED
    value, low, high = np.mean(np.array(known, dtype=np.float64), axis=0)
    return Figure(value=value, low=low, high=high)


MOST_PARTS = 16


def roc_areas(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """(M,) probability that a sample of the class scores higher than one of another; NaN without either.

    positive, negative: (M, S) samples of the class and of the others by score bin, lowest first.
    """
    of_class, others = positive.sum(axis=1), negative.sum(axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((positive * below).sum(axis=1) / (of_class * others), dtype=np.float64)


def precision_recall_areas(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """(M,) average precision: the precision at each sample of the class, highest score first, on average.

    Within a bin the class's samples are spread evenly among the others: counting the whole bin as called
    before the first of them would be too low by several points if samples are few.
    positive, negative: as in roc_areas. NaN without a sample of the class or of another.
    """
    own, rest = positive[:, ::-1].astype(np.float64), negative[:, ::-1].astype(np.float64)
    hits, called = np.cumsum(own, axis=1) - own, np.cumsum(own + rest, axis=1) - own - rest
    # beyond so many samples in a bin they are taken in equal groups
    parts = np.clip(own, 1, MOST_PARTS)
    areas = np.zeros_like(own)
    for part in range(int(parts.max(initial=0))):
        share = (part + 1) / parts
        found = hits + own * share
        wrong = called - hits + rest * (part + 0.5) / parts
        areas += np.where(part < parts, own / parts * found / np.maximum(found + wrong, 1e-9), 0.0)
    of_class, others = positive.sum(axis=1), negative.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, areas.sum(axis=1) / of_class, np.nan)


def auroc(positive: np.ndarray, negative: np.ndarray) -> Figure:
    """roc_areas of one class, (S,) each, with DeLong's interval in log odds.

    DeLong, DeLong and Clarke-Pearson 1988 (doi 10.2307/2531595).
    """
    of_class, others = int(positive.sum()), int(negative.sum())
    if of_class == 0 or others == 0:
        return UNMEASURED
    area = float(roc_areas(positive[None], negative[None])[0])
    # how much of the other group each sample of a bin beats, or is beaten by
    placed = (np.cumsum(negative) - negative / 2) / others
    beaten = (of_class - np.cumsum(positive) + positive / 2) / of_class
    variance = _variance(placed, positive) / of_class + _variance(beaten, negative) / others
    return logit_interval(area, float(np.sqrt(variance)), min(of_class, others))


def auprc(positive: np.ndarray, negative: np.ndarray) -> Figure:
    """precision_recall_areas of one class, (S,) each, with a binomial interval in log odds.

    The area is treated as a share of as many trials as the class has samples (Boyd, Eng and Page 2013,
    doi 10.1007/978-3-642-40994-3_29).
    """
    of_class = int(positive.sum())
    if of_class == 0 or int(negative.sum()) == 0:
        return UNMEASURED
    area = float(precision_recall_areas(positive[None], negative[None])[0])
    return logit_interval(area, float(np.sqrt(area * (1 - area) / of_class)), of_class)


def _variance(values: np.ndarray, counts: np.ndarray) -> float:
    """Sample variance of values that occur so often; 0 for a single one."""
    n = counts.sum()
    if n < 2:
        return 0.0
    mean = (values * counts).sum() / n
    return float(((values - mean) ** 2 * counts).sum() / (n - 1))
