"""Rounds of a strategy without a server: the context of one, and an aggregator that has begun."""

from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Message

from perennial.protocol.stamp import Stamp
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome
from perennial.strategies.round.parallel import collect
from perennial.strategies.round.request import Arrays, RoundRequest

STAMP = Stamp(run="0" * 16, experiment="e" * 64, class_order="c" * 64, task=1, round=1, num_classes=1)


def context(
    reference: Arrays, *, stamp: Stamp | None = None, replies: int = 1024, asked: int = 1, **facts: Any
) -> RoundContext:
    """A round of the curriculum, or without a stamp one of Flower's own. facts: of the request."""
    request = RoundRequest(stamp or STAMP, reference, {}, 1.0, known=replies, **facts)
    return RoundContext(cast(Any, None), request, reference, asked=asked, by_curriculum=stamp is not None)


def begun(strategy: IncrementalStrategy, reference: Arrays, **facts: Any) -> Aggregator:
    """What takes the replies of a round that begins with reference."""
    return strategy.aggregator(context(reference, **facts))


def received(
    strategy: IncrementalStrategy, ctx: RoundContext, replies: Iterable[Message]
) -> tuple[Arrays, RoundOutcome]:
    """The model and the outcome of a round of which these replies came."""
    aggregator = strategy.aggregator(ctx)
    assert collect(ctx, aggregator, strategy.traits, strategy.exchange, replies)
    return aggregator.result(), ctx.outcome
