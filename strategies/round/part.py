"""The part of a round that a strategy hands to the strategy inside it."""

from collections.abc import Mapping
from dataclasses import dataclass

from perennial.config.bounds import BoundsConfig
from perennial.config.sums import SumsConfig
from perennial.protocol.stamp import Stamp
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import Arrays


@dataclass(frozen=True)
class RoundPart:
    """What a strategy hands to one inside it when a round begins.

    reference, outcome: the inner strategy's part of the model and of the outcome; the rest
    is the round's own.
    """

    reference: Arrays
    outcome: RoundOutcome
    asked: int
    most_replies: int
    stamp: Stamp | None
    names: Mapping[int, str]
    max_update_norm: float | None
    bounds: BoundsConfig
    sums: SumsConfig
