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
