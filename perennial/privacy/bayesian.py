"""Bayesian accounting: what a typical record loses, beside the worst case and never instead of it.

The neighbouring record is a random draw from the data, so the figure covers records like most others; an
outlier is not covered. It depends on the private data through the sampled distances, and with few pairs the
Student-t bound under it is no bound. A report therefore calls it "typical record" and puts it next to the
accountant's epsilon.

Triastcyn and Faltings 2019 (arXiv 1901.09697 and, for federated learning, 1911.10071).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perennial.foundation.errors import PrivacyError

PAIRS = 10
"""Sampled distances for each invocation."""
FAILURE = 1e-10
"""Probability that the Student-t bound of one invocation does not hold."""
ORDERS = (*range(1, 65), 80, 96, 112, 128, 160, 192, 256)


def compute_scaled_divergence(
    distances: NDArray[np.float64], noise_std: float, sample_rate: float, order: int
) -> NDArray[np.float64]:
    """lambda * D_{lambda+1} between the subsampled Gaussian with and without the record, for each distance.

    distances: (m,), L2 distance of the two clipped gradients. noise_std: absolute standard deviation.
    order: lambda, an integer >= 1. Returns (m,), natural logarithm.
    """
    from scipy.special import gammaln, logsumexp

    spread = np.square(distances)[:, None] / (2 * noise_std**2)
    if sample_rate == 1:
        return order * (order + 1) * spread[:, 0]
    k = np.arange(order + 2, dtype=np.float64)
    binomial = gammaln(order + 2) - gammaln(k + 1) - gammaln(order + 2 - k)
    weights = binomial + k * math.log(sample_rate) + (order + 1 - k) * math.log1p(-sample_rate)
    return np.asarray(logsumexp(weights + (k * k - k) * spread, axis=1))


def estimate_invocation_cost(
    distances: Sequence[float] | NDArray[np.float64],
    noise_std: float,
    sample_rate: float,
    order: int,
    planned: int,
    *,
    failure_probability: float | None,
) -> float:
    """c(lambda), the cost of one invocation out of `planned`, from sampled distances.

    failure_probability: of the one-sided Student-t bound on the mean over pairs; None leaves the bare mean,
    which bounds nothing and serves comparison only. Everything stays in log space, for the terms reach
    exp(planned * lambda * D).
    Raises PrivacyError on fewer than 3 distances, or one that is negative or not finite.
    """
    from scipy.special import logsumexp, stdtrit

    pairs = np.asarray(distances, dtype=np.float64)
    if pairs.ndim != 1 or len(pairs) < 3:
        raise PrivacyError(f"{pairs.size} sampled pairs; at least 3 are needed to bound their mean")
    if not np.all(np.isfinite(pairs)) or pairs.min() < 0:
        raise PrivacyError("sampled distances must be finite and not negative")
    losses = planned * compute_scaled_divergence(pairs, noise_std, sample_rate, order)
    log_mean = float(np.asarray(logsumexp(losses))) - math.log(len(losses))
    if failure_probability is None:
        return log_mean / planned
    highest = float(losses.max())
    variance = float(np.mean(np.exp(2 * (losses - highest))) - np.exp(2 * (log_mean - highest)))
    if variance <= 0:
        return log_mean / planned
    quantile = -float(stdtrit(len(losses) - 1, failure_probability))
    log_deviation = highest + 0.5 * (math.log(variance) - math.log(len(losses) - 1))
    return float(np.logaddexp(log_mean, math.log(quantile) + log_deviation)) / planned


class BayesianAccountant:
    """Composes the costs of the invocations of one run, up to a number that was planned before it began.

    planned: T. Records are shared by all rounds, so their expectations do not multiply; the bound takes each
    to the power T and its T-th root (Hoelder), which is why a later invocation than the T-th would void all
    earlier ones.
    failure_probability: of each accumulated bound.
    """

    def __init__(self, planned: int, failure_probability: float = FAILURE) -> None:
        if planned < 1 or not 1e-16 <= failure_probability < 1:
            raise PrivacyError(
                f"planned invocations {planned}, failure probability {failure_probability}; allowed: at "
                "least 1, and 1e-16 (the last value that float64 tells from 0) up to 1"
            )
        self.planned = planned
        self.failure_probability = failure_probability
        self.invocations = 0
        self._costs = np.zeros(len(ORDERS))

    def resume(self, invocations: int, costs: NDArray[np.float64]) -> None:
        """Set the number of invocations so far and their accumulated costs, (orders,) float64."""
        self.invocations, self._costs = invocations, costs

    def accumulate(
        self,
        distances: Sequence[float] | NDArray[np.float64],
        noise_std: float,
        sample_rate: float = 1.0,
        *,
        largest: float | None = None,
    ) -> None:
        """Add one invocation with its own sampled distances and absolute noise.

        largest: what clipping allows a distance to be at most; the cost at that distance bounds the mean for
        certain, so the bound from few pairs need not be above it.
        Raises PrivacyError when the plan is used up, on bad distances, or where noise_std is not above 0.
        """
        if self.invocations == self.planned:
            raise PrivacyError(
                f"the Bayesian bound was planned for {self.planned} invocations, all used up; one more "
                "would void it for all of them. Plan more rounds, or drop the Bayesian figure"
            )
        if not noise_std > 0:
            raise PrivacyError(f"noise standard deviation is {noise_std}; Bayesian accounting needs noise")
        costs = [
            estimate_invocation_cost(
                distances,
                noise_std,
                sample_rate,
                order,
                self.planned,
                failure_probability=self.failure_probability,
            )
            for order in ORDERS
        ]
        if largest is not None:
            most = np.array([largest])
            bounds = [compute_scaled_divergence(most, noise_std, sample_rate, order)[0] for order in ORDERS]
            costs = np.minimum(costs, bounds)
        self._costs += costs
        self.invocations += 1

    @property
    def failure(self) -> float:
        """Probability that at least one of the accumulated bounds does not hold."""
        return -math.expm1(self.invocations * math.log1p(-self.failure_probability))

    def epsilon(self, delta: float) -> float:
        """Epsilon for a typical record. Raises PrivacyError if the bounds' failure alone reaches delta."""
        left = delta - self.failure
        if not left > 0:
            raise PrivacyError(
                f"the {self.invocations} Student-t bounds may fail with probability {self.failure:.3g}; "
                f"that leaves nothing of delta {delta}; lower failure_probability"
            )
        if self.invocations == 0:
            return 0.0
        return max(0.0, float(np.min((self._costs - math.log(left)) / np.asarray(ORDERS))))

    def state_dict(self) -> dict[str, object]:
        """JSON-able state, from which `restore` goes on."""
        return {
            "planned": self.planned,
            "failure_probability": self.failure_probability,
            "invocations": self.invocations,
            "costs": self._costs.tolist(),
        }

    @classmethod
    def restore(cls, state: dict[str, object]) -> "BayesianAccountant":
        """The accountant that state_dict described. Raises PrivacyError when the state does not fit."""
        match state:
            case {
                "planned": int(planned),
                "failure_probability": float(failure),
                "invocations": int(invocations),
                "costs": list(costs),
            } if len(costs) == len(ORDERS) and 0 <= invocations <= planned:
                accountant = cls(planned, failure)
                accountant.resume(invocations, np.asarray(costs, dtype=np.float64))
                return accountant
        raise PrivacyError("the stored state of the Bayesian accountant is damaged or of another version")
