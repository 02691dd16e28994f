"""A round in which all sites train side by side: one exchange, whose replies go to one aggregator."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING, getLogger
from operator import itemgetter
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor

from perennial.foundation.errors import ConfigError
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stack import Stack, find_stack
from perennial.protocol.stamp import RUN_TOKEN, SHA256, Stamp
from perennial.protocol.tensors import Tensors, pack, unpack
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.gate import Admitted, Gate, Refused, Rejected, RunningBounds
from perennial.strategies.round.request import Arrays, RoundRequest, Traits


class TakesReplies(Protocol):
    """What a round needs of a strategy."""

    traits: Traits
    exchange: Exchange

    def prepare_round(self, ctx: RoundContext) -> None: ...

    def aggregator(self, ctx: RoundContext) -> Aggregator: ...

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]: ...


def run_parallel_round(strategy: TakesReplies, ctx: RoundContext) -> RoundOutcome:
    """Send a round's requests, aggregate the replies, and return the context's outcome."""
    start = time.monotonic()
    request, outcome, exchange = ctx.request, ctx.outcome, strategy.exchange
    strategy.prepare_round(ctx)
    if strategy.traits.waits_for_busy_sites:
        exchange.settle(ctx.grid, request.sites, request.quorum)
    # a site that still works on an earlier round is not asked, and is named when its late reply comes
    exchange.names |= {node: site for site, node in request.sites.items()}
    asked = {site: node for site, node in request.sites.items() if not exchange.is_busy(site)}
    ctx.asked = outcome.asked = len(asked)
    aggregator = strategy.aggregator(ctx)
    if not isinstance(aggregator, Aggregator):
        raise _refuse_answer(strategy, "aggregator()", aggregator, "an Aggregator")
    made: dict[str, TrainRequest] = {}
    for sites, fields in request.previous.group_fields(asked):
        made |= strategy.requests(request.build_request(**fields), sites)
    requests = [(site, node, made[site]) for site, node in asked.items()]
    outcome.bytes_down += sum(message.tensor_bytes for _, _, message in requests)
    replies = exchange.train(ctx.grid, requests, request.deadline, aggregator.while_waiting)
    count = collect(ctx, aggregator, strategy.traits, exchange, map(itemgetter(1), replies))
    if count >= request.quorum:
        arrays = aggregator.result()
        if not isinstance(arrays, Mapping) or not all(isinstance(each, Tensor) for each in arrays.values()):
            raise _refuse_answer(aggregator, "result()", arrays, "a mapping of names to tensors")
        outcome.arrays = unpack(pack(arrays), "aggregate")
    outcome.absent = outcome.list_silent_sites(request.sites)
    outcome.seconds = time.monotonic() - start
    return outcome


def _refuse_answer(asked: object, what: str, found: object, allowed: str) -> ConfigError:
    """Build, and do not raise, the ConfigError for what somebody's own strategy returned."""
    return ConfigError(f"{type(asked).__name__}.{what}: returned {found!r:.80}, allowed {allowed}")


def collect(
    ctx: RoundContext, aggregator: Aggregator, traits: Traits, exchange: Exchange, replies: Iterable[Message]
) -> int:
    """Check and aggregate replies as they come; returns how many count, stand-ins included."""
    request, outcome = ctx.request, ctx.outcome
    stamp = request.stamp if ctx.by_curriculum else None
    gate = Gate(ctx.reference, stamp, ctx.max_update_norm, traits.staleness)
    running = request.running
    # a run's first round has no former one to take bounds from, so its own replies set them
    waiting = WaitingReplies(running, ctx.reference) if running is not None and running.waiting else None

    def admit(message: Message) -> list[Admitted]:
        site = exchange.find_site(message)
        try:
            return [gate.admit(message, site)]
        except Refused as refusal:
            outcome.refused.append((site, str(refusal)))
        except Rejected as rejection:
            outcome.dropped.append((site, str(rejection)))
        return []

    def take(message: Message) -> None:
        if (stack := find_stack(message)) is None:
            admitted = admit(message)
        else:
            admitted, apart = gate.admit_stack(stack, exchange.find_sites(message))
            if waiting is None and not apart and _take_stack(ctx, aggregator, admitted, stack):
                return
            admitted += [reply for place in apart for reply in admit(stack.split_off(place))]
        for reply in admitted:
            if waiting is None:
                _take(ctx, aggregator, traits, reply)
            else:
                waiting.add(reply)

    deque(map(take, replies), maxlen=0)
    if waiting is not None:
        for reply in waiting.yield_replies():
            _take(ctx, aggregator, traits, reply)
    return aggregator.complete()


def _take(ctx: RoundContext, aggregator: Aggregator, traits: Traits, reply: Admitted) -> None:
    """Bound a reply, aggregate it, and show it to the observers."""
    outcome, running = ctx.outcome, ctx.request.running
    try:
        if running is not None:
            reply = running.bound_reply(reply, traits.accepts_scaled_updates)
        aggregator.add(reply)
    except (Rejected, OverflowError) as rejection:
        outcome.dropped.append((reply.site, str(rejection)))
    else:
        _take_reply(ctx, reply)


def _take_stack(ctx: RoundContext, aggregator: Aggregator, replies: Sequence[Admitted], stack: Stack) -> bool:
    """Aggregate a stack at once; False, with nothing done, where its replies have to come one by one."""
    running = ctx.request.running
    if running is not None and any(running.needs_bound(reply) for reply in replies):
        return False
    if not aggregator.add_stack(replies, stack.rows):
        return False
    for reply in replies:
        _take_reply(ctx, reply)
    return True


def _take_reply(ctx: RoundContext, reply: Admitted) -> None:
    """Show a reply that was aggregated to the observers, and keep what it says."""
    for observer in ctx.request.observers:
        observer(reply, ctx.reference, 1)
    ctx.outcome.take(reply)


class WaitingReplies:
    """Replies of a first round, kept on disk until all are there, since their bounds follow from them."""

    def __init__(self, running: RunningBounds, reference: Arrays) -> None:
        self._running = running
        self._replies: dict[str, Admitted] = {}
        from perennial.strategies.sums.update_file import UpdateFile

        self._updates = UpdateFile(reference)

    def add(self, reply: Admitted) -> None:
        """Keep one reply. Raises OSError when the disk is full."""
        self._updates.add(reply.site, reply.update)
        self._replies[reply.site] = replace(reply, update={})

    def yield_replies(self) -> Iterator[Admitted]:
        """Yield all replies, in the order of the sites' names."""
        self._running.see_all(self._replies.values())
        for site, update in self._updates:
            yield replace(self._replies[site], update=Tensors(update))


log = getLogger("flwr").log


class FlowerRounds(FlowerFedAvg):
    """Flower's hooks for a round of a strategy; Flower chooses which nodes are asked.

    flower: keywords of Flower's FedAvg; every minimum is 1 unless given.
    """

    traits: Traits
    exchange: Exchange

    def __init__(self, **flower: Any) -> None:
        minima = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
        super().__init__(**{**minima, **flower})
        self._integers: dict[str, Array] = {}

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        """Build the object that takes the replies of one round and makes the next model."""
        raise ConfigError(f"strategy {type(self).__name__}: has no aggregator(ctx), and needs one")

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
