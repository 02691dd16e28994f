"""What the sum of discrete Gaussians of m honest sites costs.

Sums of discrete Gaussians are no discrete Gaussians, but nearly: with tau = 10 sum_{k<m} exp(-2 pi^2 s^2 k /
(k + 1)), s being a part's standard deviation in grid steps, the sum over P coordinates is (1/2)
e^2-concentrated differentially private with

    e = min( sqrt(D^2 / (m s^2) + tau P / 2),  D / (sqrt(m) s) + tau sqrt(P) )

for a contribution of norm D steps that is there or zero. Kairouz, Liu and Steinke 2021 (arXiv 2102.06387),
theorem 1 and proposition 2.
"""

import math

LEAST_STD = 4
"""Grid steps of a part's standard deviation at least."""
MOST_SITES = 1 << 20
MOST_VALUES = 10**9
"""Coordinates that tau is counted for: more than any model here has."""
# Rounding of the step and of a quotient in float64, far above what either can be.
_ROUNDING = 1 - 2.0**-40


def compute_tau(std: int, honest: int) -> float:
    """Bound, for each coordinate, on how far a sum of discrete Gaussians is from one discrete Gaussian.

    std: of each, in grid steps. honest: how many are added.
    """
    # the terms shrink as k grows, so the 64th bounds all that follow
    near = math.fsum(math.exp(-2 * math.pi**2 * std**2 * k / (k + 1)) for k in range(1, min(honest, 64)))
    return 10 * (near + max(0, honest - 64) * math.exp(-2 * math.pi**2 * std**2 * 64 / 65))


def compute_shared_multiplier(multiplier: float, std: int, honest: int, values: int = MOST_VALUES) -> float:
    """The noise multiplier of a continuous Gaussian that costs at least as much as m honest parts.

    multiplier: sigma as configured. std: s. values: coordinates of the release. Its zero-concentrated cost,
    1 / (2 multiplier^2), holds for every Renyi order; PRV's tighter figure does not.
    """
    plain = 1 / (multiplier * _ROUNDING)
    far = compute_tau(std, honest)
    cost = min(math.sqrt(plain**2 + far * values / 2), plain + far * math.sqrt(values))
    return 1 / cost
