"""What releases cost at one Renyi order, in which a lifetime budget is kept.

Later experiments are chosen when earlier releases are known. A bound that picks its best order, or a curve of
privacy losses, after the fact is proven for sequences that were fixed before; a sum at one order that was
fixed before is proven for any (Feldman and Zrnic 2021, arXiv 2008.11193, theorem 3.1; Lecuyer 2021, arXiv
2103.01379). The order follows from the budget's own epsilon and delta, so that no release can choose it. The
price is a few per cent of epsilon against the best order.

Small stated guarantees without a delta are Renyi bounds too (Bun and Steinke 2016, proposition 3.3); others
add up beside it. A group of two costs three times what one costs at twice the order (Mironov 2017,
proposition 2).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from perennial.privacy.accountants import ORDERS, compute_renyi
from perennial.privacy.composition import (
    covers_add_remove,
    find_common_unit,
    hides,
    needs_replacement,
    of_one_sample,
)
from perennial.privacy.config import Unit
from perennial.privacy.entries import Entry, Relation


@dataclass(frozen=True)
class Spent:
    """The cost of releases. renyi: at a Measure's order. epsilon, delta: of those without a Renyi bound."""

    renyi: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.renyi + other.renyi, self.epsilon + other.epsilon, self.delta + other.delta)

    def repeat(self, count: int) -> "Spent":
        """The cost of this many such releases."""
        return Spent(count * self.renyi, count * self.epsilon, count * self.delta)


NOTHING, ENDLESS = Spent(), Spent(math.inf)


@dataclass(frozen=True)
class Measure:
    """How spending is counted: the Renyi order, and the unit and neighbouring relation of the budget."""

    order: float
    unit: Unit
    relation: Relation

    @classmethod
    def of(cls, entries: Iterable[Entry], epsilon: float, delta: float, unit: Unit | None) -> "Measure":
        """The measure for a budget of (epsilon, delta) that has these releases to count.

        unit: None takes the largest unit that every release hides.
        """
        found = list(entries)
        unit = unit or find_common_unit(found)
        added = all(covers_add_remove(entry, unit) for entry in found)
        return cls(order_of(epsilon, delta), unit, "add_remove" if added else "replace")

    def of_one(self, entry: Entry) -> Spent:
        """The cost of one release, infinite if it does not hide the unit."""
        if not entry.protected or not hides(entry.unit, self.unit):
            return ENDLESS
        twice = needs_replacement(entry, self.unit, self.relation)
        if entry.epsilon is not None and entry.delta is not None:
            epsilon = 2 * entry.epsilon if twice else entry.epsilon
            if entry.delta == 0 and self.order * epsilon < 2:
                return Spent(self.order * epsilon**2 / 2)
            group = (1 + math.exp(min(entry.epsilon, 700))) if twice else 1
            return Spent(0.0, epsilon, group * entry.delta)
        assert entry.noise_multiplier is not None and entry.sample_rate is not None
        assert entry.steps is not None
        return Spent(
            _compute_gaussian(entry.noise_multiplier, entry.sample_rate, entry.steps, self.order, twice)
        )

    def of_all(self, counts: Mapping[Entry, int]) -> Spent:
        """The cost of these releases to one record; of disjoint parts only the dearest counts."""
        found = NOTHING
        for entry, count in of_one_sample(counts).items():
            found += self.of_one(entry).repeat(count)
        return found

    def epsilon(self, spent: Spent, delta: float) -> float:
        """The epsilon at this delta; infinite when the stated deltas reach it."""
        if not math.isfinite(spent.renyi + spent.epsilon) or spent.delta >= delta:
            return math.inf
        if spent.renyi == 0:
            return spent.epsilon
        return spent.epsilon + max(0.0, spent.renyi + convert_to_epsilon(self.order, delta - spent.delta))


def convert_to_epsilon(order: float, delta: float) -> float:
    """What a Renyi bound at this order adds to become an epsilon. Balle et al. 2020 (arXiv 1905.09982)."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@cache
def order_of(epsilon: float, delta: float) -> float:
    """The Renyi order at which a budget of (epsilon, delta) allows the most Gaussian releases."""
    return max(ORDERS, key=lambda order: (epsilon - convert_to_epsilon(order, delta)) / order)


@cache
def _compute_gaussian(noise: float, rate: float, steps: int, order: float, twice: bool) -> float:
    if noise == 0:
        return math.inf
    if rate == 1:
        return steps * order / (2 * (noise / 2 if twice else noise) ** 2)
    if twice:
        return 3 * compute_renyi(2 * order, noise, rate, steps) if order >= 2 else math.inf
    return compute_renyi(order, noise, rate, steps)
