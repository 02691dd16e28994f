"""What a strategy whose sites train one after the other offers to whoever values its turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from flwr.serverapp import Grid
from torch import Tensor

from perennial.learning.worth import Worth

if TYPE_CHECKING:
    from perennial.strategies.round.gate import Admitted
    from perennial.strategies.round.request import RoundRequest

Weigh = Callable[[Mapping[str, Tensor]], Worth | None]
"""From a model to what it is worth on each class; None where nobody could say."""


class TakesTurns(Protocol):
    """A strategy whose sites take turns with one model.

    segments: sweeps of a round.
    freeze: modules that no turn changes, counted from the input.
    relabel: "none", or how neurons are renamed between turns.
    weighed: sweeps of the coming round before, in and after which models are weighed.
    """

    segments: int
    freeze: int
    weighed: frozenset[int]

    @property
    def renames_neurons(self) -> bool:
        """Whether neurons have other names after a turn, so that updates of two turns cannot be added."""
        ...

    def weigh_by(self, weigh: Weigh, *, first: bool, tell: Sequence[str] = ()) -> None:
        """Ask weigh what a model is worth.

        first: before a site is given the model, not while it works. tell: measurements to ask of each turn.
        """
        ...

    def turn(
        self,
        grid: Grid,
        request: "RoundRequest",
        site: str,
        arrays: Mapping[str, Tensor],
        sweep: int,
        holds_previous: bool,
        meanwhile: Callable[[], None] = ...,
    ) -> "tuple[Admitted, int]":
        """(the site's reply to arrays, bytes sent to it). meanwhile: what to do while it works."""
        ...
