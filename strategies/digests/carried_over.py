"""What a strategy of digests hands on when groups of sites change."""

from dataclasses import dataclass

from torch import Tensor

from perennial.strategies.digests.lending import DigestLending


@dataclass(frozen=True)
class CarriedOver:
    """The trained state that a strategy of digests hands to its successor.

    guidance: the producer's tensors.
    own: the server's own layers.
    velocity: of the producer.
    """

    lending: DigestLending
    guidance: dict[str, Tensor]
    withdrawals: int
    own: dict[str, Tensor]
    velocity: Tensor | None
