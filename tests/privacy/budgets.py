"""Budgets for tests: what a number of releases just fits into."""

from collections import Counter
from collections.abc import Sequence

from perennial.privacy.config import Unit
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Limit


def budget_for(entries: Sequence[Entry], delta: float, unit: Unit | None = None) -> Limit:
    """The smallest budget, to a relative 1e-6, into which these releases fit together."""
    low, high = 1e-3, 1e4
    while high > low * (1 + 1e-6):
        limit = Limit((low * high) ** 0.5, delta, unit)
        measure = limit.measure(entries)
        fits = measure.epsilon(measure.of_all(Counter(entries)), delta) <= limit.epsilon
        low, high = (low, limit.epsilon) if fits else (limit.epsilon, high)
    return Limit(high, delta, unit)
