"""PP-FCIL's aggregation: capped weights from size, recency, held-out quality and inverse loss.

Varalakshmi et al. 2026 (doi 10.38124/ijisrt/26apr1499), equations 6 and 7; recency, which they leave
undefined, is the timeliness of Xiao, Tang and Lu 2024 (doi 10.1109/TMLCN.2023.3344074).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from perennial.config.rounds import MAX_SAMPLES
from perennial.config.strategies import ASKS, find_weight_measurements
from perennial.models.sum_grid import SumGrid
from perennial.protocol.measurements import (
    CLASS_COVERAGE,
    CLASSIFICATION_LOSS,
    HELD_OUT_ACCURACY,
    TRAIN_ACCURACY,
)
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import Disclosures, Traits
from perennial.strategies.sums.exact_sum import ExactSum

LEAST = 1e-3
"""No value of a factor counts below this, so that a share never magnifies the grid of the exact sum much."""
MAX_WEIGHT = 0.5
"""Cap on a site's weight in rounds of three sites or more, because all factors are the sites' own words."""
KAPPA = 0.5
"""Recency is exp(-KAPPA * rounds late)."""
STALENESS = 2
"""Rounds by which a reply may be late and still count."""
LOSS_FLOOR = 1e-3
"""Added to a loss before it is inverted."""

Values = dict[str, float | None]


class MultiFactor(IncrementalStrategy):
    """theta + sum_k w_k update_k, the weights w_k of mixed().

    alpha, beta, gamma, delta: of size, recency, quality and inverse loss; only their proportions count. By
    default size counts alone, which is FedAvg with a cap: the others gained nothing. Accuracy and inverse
    loss favour sites with few classes, so keep them small.
    timeliness: "coverage" weighs the share of seen classes that a site holds in the place of recency.
    quality: accuracy on samples held out from training, or "train" as the paper's abstract has it.

    Aggregates as replies come, in one accumulator for each factor. The few updates that may yet be capped are
    kept beside them.
    """

    asks = ASKS["multi_factor"]

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 0.0,
        gamma: float = 0.0,
        delta: float = 0.0,
        timeliness: Literal["recency", "coverage"] = "recency",
        quality: Literal["held_out", "train"] = "held_out",
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        given = {"size": alpha, "timeliness": beta, "quality": gamma, "inverse_loss": delta}
        if not all(0 <= value < math.inf for value in given.values()) or not any(given.values()):
            raise ValueError(
                f"alpha, beta, gamma, delta: found {alpha}, {beta}, {gamma}, {delta}; "
                "allowed: finite numbers, none negative and not all 0"
            )
        self.coefficients = {name: value for name, value in given.items() if value}
        self.timeliness, self.quality = timeliness, quality
        # the site takes from the same keys what it may be asked
        keys = {"beta": beta, "gamma": gamma, "delta": delta, "timeliness": timeliness, "quality": quality}
        self._measured = find_weight_measurements(keys)
        measured = ", ".join(sorted(self.measurements)).replace("_", " ")
        requires = f"{measured}, measured at the sites" if measured else ""
        self.traits = Traits(staleness=STALENESS, requires=requires)

    def disclosures(self) -> Disclosures:
        """Whether weights depend on what sites report beside samples, which no claim covers."""
        return Disclosures(weights_use_metrics=bool(self.measurements))

    @property
    def measurements(self) -> list[str]:
        """The figures that sites report for the weights."""
        return list(self._measured)

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        return WeightedFactors(ctx, self)


class WeightedFactors(Aggregator):
    """One sum for each factor, and the few updates whose weight may yet be capped."""

    def __init__(self, ctx: RoundContext, method: MultiFactor) -> None:
        super().__init__(ctx)
        self._method = method
        self._values: dict[str, Values] = {}
        self._reported = {
            name: ExactSum(ctx.reference, self._build_grid(name)) for name in method.coefficients
        }
        self._unreported: dict[str, ExactSum] = {}
        self._largest = LargestWeights(int(1 / MAX_WEIGHT + 1e-9))

    def add(self, reply: Admitted) -> None:
        """Add one reply. Raises Rejected when a figure is not finite or out of its range."""
        values = self._factors(reply)
        sums = {name: self._sum(name, value) for name, value in values.items()}
        # before any sum is touched: a reply is in all of them or in none
        if not all(total.grid.holds(values[name] or 1.0, reply.norm) for name, total in sums.items()):
            raise OverflowError(f"update of norm {reply.norm:.3g} does not fit the exact sum")
        for name, total in sums.items():
            total.add(reply.update, values[name] or 1.0, reply.norm)
        self._values[reply.site] = values
        self._largest.offer(reply.site, tuple(values.values()), reply.update)

    def result(self) -> dict[str, Tensor]:
        sites, coefficients = sorted(self._values), self._method.coefficients
        shares = {name: share([self._values[site][name] for site in sites]) for name in coefficients}
        raw = [mix_factors(coefficients, shares, self._values[site]) for site in sites]
        filled = cap_weights(raw, MAX_WEIGHT)
        whole = math.fsum(coefficients.values())
        terms: list[tuple[float, Mapping[str, Tensor]]] = []
        for name, coefficient in coefficients.items():
            part = coefficient / whole * filled.rest
            terms.append((part * shares[name].scale, self._reported[name].value()))
            if name in self._unreported:
                terms.append((part * shares[name].unreported, self._unreported[name].value()))
        for position, weight in sorted(filled.fixed.items()):
            site = sites[position]
            # what the sums hold of this site is replaced by its fixed weight
            terms.append((weight - raw[position] * filled.rest, self._largest.update(site)))
        self.ctx.outcome.details["weights"] = {
            site: round(filled.weight(position, raw[position]), 6) for position, site in enumerate(sites)
        }
        return {name: _add_terms(tensor, name, terms) for name, tensor in self.ctx.reference.items()}

    def _factors(self, reply: Admitted) -> Values:
        values: Values = {}
        for name in self._method.coefficients:
            match name:
                case "size":
                    value = float(reply.num_examples)
                case "timeliness" if self._method.timeliness == "recency":
                    now = self.ctx.number if self.ctx.by_curriculum else reply.base_round
                    value = math.exp(-KAPPA * (now - reply.base_round))
                case "timeliness":
                    value = _read_figure(reply, CLASS_COVERAGE, 1.0)
                case "quality":
                    held_out = self._method.quality == "held_out"
                    value = _read_figure(reply, HELD_OUT_ACCURACY if held_out else TRAIN_ACCURACY, 1.0)
                case _:
                    loss = _read_figure(reply, CLASSIFICATION_LOSS, math.inf, reply.train_loss)
                    value = None if loss is None else 1 / (loss + LOSS_FLOOR)
            values[name] = None if value is None else max(value, LEAST)
        return values

    def _sum(self, name: str, value: float | None) -> ExactSum:
        if value is not None:
            return self._reported[name]
        return self._unreported.setdefault(name, ExactSum(self.ctx.reference, self.ctx.sum_grid()))

    def _build_grid(self, name: str) -> SumGrid:
        """The grid for weights that are values of this factor."""
        largest = {"size": MAX_SAMPLES, "inverse_loss": 1 / LOSS_FLOOR}
        return self.ctx.sum_grid(max(1.0, largest.get(name, 1.0)))


def _read_figure(reply: Admitted, name: str, highest: float, otherwise: float | None = None) -> float | None:
    """A figure from 0 to highest among the reply's metrics, or `otherwise` where there is none."""
    value = reply.metrics.get(name, otherwise)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # comparisons work with integers that no float can hold, and NaN fails them
    if not number or not 0 <= value <= min(highest, sys.float_info.max):
        raise Rejected(f"{name}: found {value!r:.20}, allowed a finite number from 0 to {highest:g}")
    return float(value)


def _add_terms(tensor: Tensor, name: str, terms: list[tuple[float, Mapping[str, Tensor]]]) -> Tensor:
    """tensor + sum of factor * term[name], in float64 and back."""
    (factor, first), *others = terms
    total = first[name] * factor
    for factor, term in others:
        total.add_(term[name].to(total.device), alpha=factor)
    return total.add_(tensor).to(tensor.dtype)


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


def mix_factors(
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


def cap_weights(weights: Sequence[float], largest: float) -> Filled:
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


Factors = tuple[float | None, ...]


class LargestWeights:
    """The updates that can be among the `count` with the largest weights, whatever replies are still to come.

    A weight grows with each factor, so a site that is below `count` others in every factor is out for good.
    What is kept grows with a power of the logarithm of the number of sites for unrelated factors, and is
    `count` for one factor.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[str, tuple[Factors, Mapping[str, Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def update(self, site: str) -> Mapping[str, Tensor]:
        return self._kept[site][1]

    def offer(self, site: str, factors: Factors, update: Mapping[str, Tensor]) -> None:
        """Note one site's factors, and keep its update while it may be among the largest.

        factors: of equal length for all sites; None, which only the whole round can value, compares with
        nothing else.
        """
        if self._count_above(factors) >= self._count:
            return
        self._kept[site] = factors, update
        outdone = [
            name
            for name, (own, _) in self._kept.items()
            if name != site and _is_below(own, factors) and self._count_above(own) > self._count
        ]
        for name in outdone:
            del self._kept[name]

    def _count_above(self, factors: Factors) -> int:
        return sum(_is_below(factors, others) for others, _ in self._kept.values())


def _is_below(factors: Factors, others: Factors) -> bool:
    """Whether no factor is above the other's; a site is below itself."""
    return all(
        own == other if own is None or other is None else own <= other
        for own, other in zip(factors, others, strict=True)
    )
