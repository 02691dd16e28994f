"""How much noise an honest claim needs for what leaves beside updates: digests and sparsity vectors.

Sensitivities are for the replacement of one training sample, with bounds that are public: a bound taken from
the data would be a release itself.
"""

import math

from perennial.foundation.errors import PrivacyError


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Least standard deviation over L2 sensitivity of one Gaussian release with (epsilon, delta).

    The analytic Gaussian mechanism, exact for every epsilon > 0, where the textbook sqrt(2 ln(1.25 / delta))
    / epsilon holds below 1 only. Rounded up.
    Raises PrivacyError when epsilon is not above 0 or delta is outside (0, 1).

    Balle and Wang 2018 (arXiv 1805.06530), theorem 8.
    """
    from scipy.special import log_ndtr, ndtr

    if not 0 < epsilon < math.inf or not 0 < delta < 1:
        raise PrivacyError(
            f"epsilon {epsilon}, delta {delta}; allowed: a finite number above 0, above 0 and below 1"
        )

    def needed(multiplier: float) -> float:
        half, shift = 1 / (2 * multiplier), epsilon * multiplier
        return float(ndtr(half - shift) - math.exp(epsilon + float(log_ndtr(-half - shift))))

    low, high = 1e-6, 1.0
    while needed(high) > delta:
        low, high = high, 2 * high
    while high > low * (1 + 1e-9):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > delta else (low, middle)
    return high


def digest_l2_sensitivity(bound: float, largest_weight: float, non_negative: bool) -> float:
    """L2 change of a mixed digest when one sample is replaced, its features clipped to L2 norm bound.

    largest_weight: of one sample in its mixture, 1 / samples per digest when balanced. A sample lies in one
    digest, so one digest changes. non_negative: features after a ReLU, of which two are at most sqrt(2) *
    bound apart. Hsu et al. 2022 (arXiv 2210.00737), with the sensitivity of what is really released.
    """
    return (math.sqrt(2) if non_negative else 2) * bound * largest_weight


def digest_l1_sensitivity(length: int, largest_value: float, largest_weight: float) -> float:
    """L1 change of a mixed digest of length features in [0, largest_value], when one sample is replaced."""
    return length * largest_value * largest_weight


def sparsity_l2_sensitivity(channels: int, samples: int) -> float:
    """L2 change of a mean of sparsity vectors in [0, 1]^channels, when one of the samples is replaced."""
    return math.sqrt(channels) / samples
