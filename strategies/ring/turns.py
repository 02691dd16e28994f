"""The interface of a strategy whose sites train one after the other, for wrappers that value its turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from flwr.serverapp import Grid
from torch import Tensor

from perennial.learning.worth import Worth

if TYPE_CHECKING:
    from perennial.strategies.round.gate import Admitted
    from perennial.strategies.round.request import RoundRequest

Weigh = Callable[[Mapping[str, Tensor]], Worth | None]
"""From a model to its worth on each class; None if nobody could measure it."""


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

    def weigh_by(self, weigh: Weigh, *, first: bool, measurements: Sequence[str] = ()) -> None:
        """Have weigh measure models before, in and after the weighed sweeps.

        first: before a site gets the model, not while it works.
        measurements: what to ask of each turn.
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
