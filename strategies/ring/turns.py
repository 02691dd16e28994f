"""How the turns of a ring are valued while they are taken, as a round's request says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from perennial.learning.worth import Worth

Weigh = Callable[[Mapping[str, Tensor]], Worth | None]
"""From a model to its worth on each class; None if nobody could measure it."""


@dataclass(frozen=True)
class Weighing:
    """Have models measured before, in and after some sweeps of a round.

    sweeps: those whose models are weighed.
    first: weigh before a site gets the model, not while it works.
    """

    weigh: Weigh
    sweeps: frozenset[int]
    first: bool = False
