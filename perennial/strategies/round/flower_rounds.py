"""Rounds under Flower's own start(), with any ClientApp that follows Flower's convention."""

from collections.abc import Iterable
from logging import INFO, WARNING, getLogger
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from perennial.foundation.errors import ConfigError
from perennial.protocol.stamp import RUN_TOKEN, SHA256, Stamp
from perennial.protocol.tensors import pack, unpack
from perennial.strategies.round.context import Aggregator, RoundContext
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.parallel import collect
from perennial.strategies.round.request import RoundRequest
from perennial.strategies.round.traits import Traits

log = getLogger("flwr").log


class FlowerRounds(FlowerFedAvg):
    """Flower's hooks for a round of a strategy; Flower chooses which nodes are asked.

    flower: keywords of Flower's FedAvg; every minimum is 1 unless given.
    """

    traits: Traits
    exchange: Exchange
    max_update_norm: float | None

    def __init__(self, **flower: Any) -> None:
        minima = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
        super().__init__(**{**minima, **flower})
        self._integers: dict[str, Array] = {}

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        """Build the object that takes the replies of one round and makes the next model."""
        raise NotImplementedError

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the requests of a round under Flower's start(), and remember the model that goes out.

        Raises ConfigError if the method needs more than Flower's own start() gives it.
        """
        traits = self.traits
        if traits.requires:
            raise ConfigError(
                f"strategy {type(self).__name__}: needs {traits.requires}, which Flower's own start() with "
                "another ClientApp does not give; it would run another method under this name. Run it with "
                "`perennial run` or as a Perennial app; docs/interop.md lists the strategies that work here"
            )
        model = unpack(arrays, "model")
        reference = {name: tensor for name, tensor in model.items() if tensor.is_floating_point()}
        # integer buffers (BatchNorm's counters) are never averaged: the server keeps its own
        self._integers = {name: array for name, array in arrays.items() if name not in reference}
        messages = list(super().configure_train(server_round, arrays, config, grid))
        unstamped = Stamp(
            run="0" * RUN_TOKEN,
            experiment="0" * SHA256,
            class_order="0" * SHA256,
            task=1,
            round=server_round,
            num_classes=1,
        )
        request = RoundRequest(unstamped, reference, {}, 0.0, known=len(messages))
        self._round = RoundContext(
            grid,
            request,
            reference,
            asked=len(messages),
            max_update_norm=self.max_update_norm,
            by_curriculum=False,
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Admit and aggregate replies as they come; (None, None) when none passes: the model stays."""
        ctx = self._round
        outcome = ctx.outcome = RoundOutcome()
        aggregator = self.aggregator(ctx)
        count = collect(ctx, aggregator, self.traits, self.exchange, replies)
        _log_failures(outcome)
        _require_a_reply(outcome, server_round)
        if not count:
            return None, None
        record = pack(aggregator.result())
        for name, array in self._integers.items():
            record[name] = array
        loss = outcome.train_loss
        return record, MetricRecord({} if loss is None else {"train_loss": loss})


def _require_a_reply(outcome: RoundOutcome, server_round: int) -> None:
    """Raise ConfigError if nothing of a first round could be used: the next rounds would end alike."""
    failures = [*outcome.dropped, *outcome.refused]
    if server_round == 1 and failures and not outcome.participants:
        site, reason = failures[0]
        raise ConfigError(
            f"round 1: none of {len(failures)} replies could be used, so no model follows; {site}: {reason}"
        )


def _log_failures(outcome: RoundOutcome) -> None:
    """In the words of Flower's own strategies, because under start() nobody reads the outcome."""
    failures = [*outcome.dropped, *outcome.refused]
    results = len(outcome.participants)
    log(INFO, "aggregate_train: Received %s results and %s failures", results, len(failures))
    for site, reason in failures:
        log(WARNING, "\t> Dropped the reply of %s: %s", site, reason)
    for sentence in outcome.warnings:
        log(WARNING, "\t> %s", sentence)
