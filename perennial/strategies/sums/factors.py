"""The weights of PP-FCIL's multi-factor aggregation, from what the sites report and how late they were.

Varalakshmi et al. 2026 (doi 10.38124/ijisrt/26apr1499), equation 7, prints
w_k = alpha n_k/n + beta r_k + gamma p_k + delta / L_k, which sums to anything and lets one tiny loss rule the
model. Here every factor is first a share of its own sum, and the mixture is convex:

    w_k = (alpha s_k + beta rho_k + gamma pi_k + delta q_k) / (alpha + beta + gamma + delta)

with s, rho, pi and q the shares of size, recency, quality and inverse loss. m: sites in the round.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNCAPPED_SITES = 2
"""Two sites could only be capped to equal weights, whatever they hold."""


@dataclass(frozen=True)
class Share:
    """How the values of one factor become shares: value * scale + constant, or `unreported` if there is none.

    A site that reports nothing counts as the mean of those that do, so that silence neither pays nor costs.
    """

    scale: float
    constant: float
    unreported: float

    def of(self, value: float | None) -> float:
        return self.unreported if value is None else value * self.scale + self.constant


def share(values: Sequence[float | None]) -> Share:
    """How one factor's values become shares, over m > 0 sites; all equal if no value is above 0.

    values: (m,) finite and not negative; None if a site reported nothing.
    """
    sites = len(values)
    reported = [value for value in values if value is not None]
    total = math.fsum(reported)
    # below the least normal number the reciprocal would be infinite
    if total < sys.float_info.min:
        return Share(0.0, 1 / sites, 1 / sites)
    return Share(1 / (total * (sites / len(reported))), 0.0, 1 / sites)


def mixed(
    coefficients: Mapping[str, float], shares: Mapping[str, Share], values: Mapping[str, float | None]
) -> float:
    """One site's weight before the cap. coefficients, shares, values: of each factor, by name."""
    whole = math.fsum(coefficients.values())
    return math.fsum(
        coefficient / whole * shares[name].of(values[name]) for name, coefficient in coefficients.items()
    )


@dataclass(frozen=True)
class Filled:
    """Weights after the cap: `fixed` by position, and every other weight times `rest`."""

    fixed: Mapping[int, float]
    rest: float = 1.0

    def weight(self, position: int, weight: float) -> float:
        return self.fixed[position] if position in self.fixed else weight * self.rest


def water_fill(weights: Sequence[float], largest: float) -> Filled:
    """Cap each weight at `largest`, and give the excess to the others in proportion, until none is above.

    weights: (m,) not negative, sum 1. If m * largest <= 1 all weights become 1 / m. One or two sites are
    not capped. At most 1 / largest sites are fixed, and they have the largest weights.
    """
    sites = len(weights)
    if sites <= UNCAPPED_SITES:
        return Filled({})
    if largest * sites <= 1:
        return Filled(dict.fromkeys(range(sites), 1 / sites))
    fixed: dict[int, float] = {}
    rest = 1.0
    while above := [k for k, weight in enumerate(weights) if k not in fixed and weight * rest > largest]:
        fixed |= dict.fromkeys(above, largest)
        others = [k for k in range(sites) if k not in fixed]
        free = math.fsum(weights[k] for k in others)
        left = 1 - largest * len(fixed)
        if free == 0:
            # there is no proportion to hand the rest out in
            return Filled(fixed | dict.fromkeys(others, left / len(others)))
        rest = left / free
    return Filled(fixed, rest)
