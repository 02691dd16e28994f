"""One typed object for the five numbers of a Gaussian mechanism: give four, and it finds the fifth."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from perennial.foundation.errors import PrivacyError
from perennial.privacy.accountants import make_accountant
from perennial.privacy.config import AccountantName

_TOLERANCE = 1e-3

# PRV's answer lies within a few per cent to a third of RDP's.
_NEAR = 1.3


@dataclass(frozen=True)
class Budget:
    """epsilon and delta against noise multiplier, sample rate and steps.

    noise_multiplier: standard deviation over sensitivity, so half the configured value in mode client_local.
    sample_rate: of Poisson sampling, 1 for none. Leave exactly one of the five as None.
    """

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    sample_rate: float | None = 1.0
    steps: int | None = None

    def __post_init__(self) -> None:
        missing = [field.name for field in fields(self) if getattr(self, field.name) is None]
        if len(missing) != 1:
            raise PrivacyError(
                f"{len(missing)} of epsilon, delta, noise_multiplier, sample_rate and steps are missing"
                f"{': ' + ', '.join(missing) if missing else ''}; leave out exactly one, the one to solve for"
            )
        allowed = {
            "epsilon": (self.epsilon is None or 0 < self.epsilon < math.inf, "a finite number above 0"),
            "delta": (self.delta is None or 0 < self.delta < 1, "above 0, below 1"),
            "noise_multiplier": (
                self.noise_multiplier is None or 0 <= self.noise_multiplier < math.inf,
                "a finite number, 0 or more",
            ),
            "sample_rate": (self.sample_rate is None or 0 < self.sample_rate <= 1, "above 0, at most 1"),
            "steps": (self.steps is None or self.steps >= 1, "1 or more"),
        }
        for name, (valid, values) in allowed.items():
            if not valid:
                raise PrivacyError(f"{name} is {getattr(self, name)}; allowed: {values}")

    def solve(self, accountant: AccountantName = "prv") -> "Solved":
        """Compute the number that is None from the other four.

        The claim stays true: the accountant confirms the answer, so a noise multiplier or delta is rounded
        up, steps and a sample rate are rounded down, by a relative 1e-3 at most; epsilon is the accountant's
        own bound.
        Raises PrivacyError when no value reaches the goal.
        """

        missing = next(field.name for field in fields(self) if getattr(self, field.name) is None)
        if missing == "epsilon":
            return self._solved(epsilon=self.cost(accountant))

        def is_enough(value: float) -> bool:
            return replace(self, **{missing: value, "epsilon": None}).cost(accountant) <= (self.epsilon or 0)

        # RDP is quick and asks for a little more than PRV, so its answer holds and is near.
        start = getattr(self.solve("rdp"), missing) if accountant == "prv" else None
        if missing == "steps":
            return self._solved(steps=_find_most_steps(is_enough, start))
        if missing == "sample_rate":
            inverse = _find_least(lambda x: is_enough(1 / x), 1.0, 1e9, missing, 1 / start if start else None)
            return self._solved(sample_rate=1 / inverse)
        low, high = (1e-12, 0.5) if missing == "delta" else (1e-2, 1e6)
        return self._solved(**{missing: _find_least(is_enough, low, high, missing, start)})

    def cost(self, accountant: AccountantName) -> float:
        if (
            self.noise_multiplier is None
            or self.sample_rate is None
            or self.steps is None
            or self.delta is None
        ):
            raise PrivacyError("only epsilon can be computed from the other four in one step")
        history = [(self.noise_multiplier, self.sample_rate, self.steps)]
        return make_accountant(accountant, history).epsilon(self.delta)

    def _solved(self, **found: Any) -> "Solved":
        return Solved(**{field.name: getattr(self, field.name) for field in fields(self)} | found)


@dataclass(frozen=True)
class Solved:
    """A Budget in which nothing is missing."""

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int


def _find_least(
    holds: Callable[[float], bool], low: float, high: float, what: str, start: float | None
) -> float:
    """Smallest value in [low, high], up to _TOLERANCE, where holds is true; it changes once, to true.

    start: a value where holds is known to be true, close to the answer; None without one.
    """
    if start is not None:
        high = start
        while high > low and holds(max(low, high / _NEAR)):
            high = max(low, high / _NEAR)
        low = max(low, high / _NEAR)
    elif not holds(high):
        raise PrivacyError(f"no {what} reaches the budget: even the most protective value costs more")
    elif holds(low):
        return low
    while high > low * (1 + _TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _find_most_steps(holds: Callable[[float], bool], start: int | None) -> int:
    """Largest number of steps for which holds is true."""
    if start is None and not holds(1):
        raise PrivacyError("a single step already costs more than the budget; raise the noise multiplier")
    low, factor = (1, 2.0) if start is None else (start, _NEAR)
    while holds(high := math.ceil(low * factor)):
        low = high
        if high > 10**9:
            raise PrivacyError("over 10**9 steps stay within the budget; lower the noise multiplier")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
