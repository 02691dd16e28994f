"""An estimate of Gaussian differential privacy, mu, from what canaries did to a release.

It assumes that the score of a canary is normal with one variance, whether it is there or not, as Gaussian
noise makes it when nothing else moves. Under that assumption mu is the distance of the two means in standard
deviations. It is an estimate and no bound: where the assumption fails it may be too small.

Dong, Roth and Su 2022 (arXiv 1905.02383).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm


@dataclass(frozen=True)
class MuEstimate:
    """mu with the ends of a 95 % interval; claimed: of the Gaussian mechanism that the claim is worth."""

    mu: float
    low: float
    high: float
    claimed: float

    @property
    def contradicts(self) -> bool:
        """Whether the whole interval lies above the claim."""
        return self.low > self.claimed


def estimate_mu(scores: np.ndarray, present: np.ndarray, epsilon: float, delta: float) -> MuEstimate:
    """mu of scores, (m,), of canaries that are present, (m,) bool, against a claim of (epsilon, delta)."""
    groups = [scores[present], scores[~present]]
    sizes = [len(group) for group in groups]
    if min(sizes) < 2:
        return MuEstimate(0.0, 0.0, math.inf, mu_of(epsilon, delta))
    variance = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / (sum(sizes) - 2)
    distance = float(groups[0].mean() - groups[1].mean())
    mu = max(0.0, distance / math.sqrt(variance)) if variance > 0 else math.inf * (distance > 0)
    error = math.sqrt(1 / sizes[0] + 1 / sizes[1] + mu**2 / (2 * sum(sizes))) if math.isfinite(mu) else 0.0
    wide = float(norm.isf(0.025))
    return MuEstimate(mu, max(0.0, mu - wide * error), mu + wide * error, mu_of(epsilon, delta))


def mu_of(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian mechanism has this delta at this epsilon; infinite for an infinite epsilon."""
    if not math.isfinite(epsilon):
        return math.inf

    def excess(mu: float) -> float:
        far = float(norm.logcdf(-epsilon / mu - mu / 2)) + epsilon
        return float(norm.cdf(-epsilon / mu + mu / 2)) - math.exp(min(far, 700.0)) - delta

    low, high = 1e-6, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return high
