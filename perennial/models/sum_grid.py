"""The public grid on which weighted updates are added up as integers.

Integer addition is associative, so a sum on a grid has the same bits in any order. The grid follows from
what is known before the first reply of a round: how many updates the sum has to hold, the largest weight and
the largest norm that an update may come with. Each update gets an equal part of the range, so whether one
fits depends on nothing that another site sends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FINEST = 2.0**-34
"""Half of it, 2.9e-11, is below the spacing of float32 numbers of size 0.0005."""
BITS = 64
LARGEST_NORM = 1024.0
"""L2 norm that an update of the largest weight may have; at half the weight it may be twice that."""
HEADROOM = 2
"""Bits of the range that stay free besides the sign: a sum holds four times as many updates as it has to."""


@dataclass(frozen=True)
class SumGrid:
    """Integers of 64 bits, each step of which is worth `step`.

    updates: how many the sum has to hold. largest_weight, largest_norm: of one of them; an update may trade
    one for the other. Raises ValueError when one of these is not above 0.
    """

    updates: int = 1024
    largest_weight: float = 1.0
    largest_norm: float = LARGEST_NORM

    def __post_init__(self) -> None:
        for name in ("updates", "largest_weight", "largest_norm"):
            if not 0 < (found := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}: found {found}, allowed a finite number above 0")

    @cached_property
    def step(self) -> float:
        """The value of one step, a power of two: as fine as the range allows, and not below FINEST."""
        largest = _round_to_power_of_two(self.updates) * _round_to_power_of_two(
            self.largest_weight * self.largest_norm
        )
        return max(FINEST, largest * 2.0 ** (HEADROOM + 1 - BITS))

    @cached_property
    def share(self) -> float:
        """The largest weight * norm that one update may have."""
        return self.step * 2.0 ** (BITS - HEADROOM - 1) / _round_to_power_of_two(self.updates)

    def holds(self, weight: float, norm: float) -> bool:
        """Whether an update of this weight and norm fits, whatever else is in the sum."""
        return weight * norm <= self.share

    def quantise(self, update: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
        """weight * update in int64 steps, in its shapes, rounded towards zero so that no norm grows.

        Raises OverflowError for an update that does not fit.
        """
        norm = math.sqrt(math.fsum(float(t.double().square().sum()) for t in update.values()))
        if not self.holds(weight, norm):
            raise OverflowError(
                f"weighted update of norm {weight * norm:.3g}: the sum's grid allows {self.share:.3g}"
            )
        return {
            name: (t.double() * (weight / self.step)).trunc().to(torch.int64) for name, t in update.items()
        }

    def values(self, steps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a sum of steps to float64 values."""
        return {name: t.to(torch.float64).mul_(self.step) for name, t in steps.items()}


def _round_to_power_of_two(value: float) -> float:
    """The least power of two from value on."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
