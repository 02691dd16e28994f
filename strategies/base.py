"""What every strategy of Perennial shares: the gate, streaming aggregation, hooks for tasks, durable state.

A method is a subclass that defines what it does with one admitted reply (`fold`) and which model the round
ends with (`finish_round`). It works under Flower's own `start()` with any ClientApp that follows Flower's
convention, and under the curriculum, which calls `begin_task`,
`train_round`, `state_dict` and `load_state_dict`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from logging import INFO, WARNING, getLogger
from typing import TYPE_CHECKING, Any, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor

from perennial.config.asks import Asks
from perennial.config.bounds import BoundsConfig
from perennial.config.sums import SumsConfig
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.models.sum_grid import SumGrid
from perennial.protocol.measurements import asking
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors, byte_count, pack, unpack
from perennial.strategies.ring.turns import TakesTurns
from perennial.strategies.round.disclosures import Disclosures
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.gate import Admitted, Gate, Refused, Rejected
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.part import RoundPart
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart
from perennial.strategies.round.running_bounds import RunningBounds
from perennial.strategies.round.services import Services
from perennial.strategies.round.waiting import WaitingReplies

if TYPE_CHECKING:
    from perennial.strategies.analytic import Analytic
    from perennial.strategies.robust_rule import RobustRule

log = getLogger("flwr").log
Watch = Callable[[Admitted, Arrays, int], dict[str, Any]]
"""(reply taken into the model, the model that it started from, sweep of a ring or 1) -> JSON-able facts."""


class MaskedRounds(Protocol):
    """Rounds of which the server sees the sum alone; strategies/secure/masked_round.py."""

    def train_round(
        self,
        strategy: "IncrementalStrategy",
        grid: Grid,
        request: RoundRequest,
        common: TrainRequest,
    ) -> RoundOutcome:
        """One round of the strategy. common: the request to sites that hold the previous model."""
        ...


class IncrementalStrategy(FlowerFedAvg):
    """Base of all strategies.

    max_update_norm: L2 norm above which an update is dropped; None: no bound.
    flower: keywords of Flower's FedAvg, for use under start(); every minimum is 1 unless given.
    """

    staleness = 0
    """Rounds by which a reply may be late and still be used."""
    waits_for_busy_sites = True
    """Whether a round waits for sites that still work on an earlier one where too few others are there."""
    takes_parts = True
    """Whether an update may be scaled down: not where the site remembers the whole of it."""
    compares_updates = False
    """Whether the method keeps the updates of a round and decides among them."""
    serves_groups = True
    """Whether a cluster can have a strategy of this kind, beside those of other clusters."""
    combines_replies = True
    """Whether a round is one exchange with all sites, whose replies are folded; a ring has hops instead."""
    stands_in = False
    """Whether it makes updates in place of sites that do not answer."""
    asks = Asks()
    """All that its requests may ask of a site beside an update."""
    needs: str = ""
    """What the method needs and Flower's own start() with other people's ClientApps does not provide, in
    words; without it another method would run under this one's name. '' if nothing is missing."""

    def __init__(self, max_update_norm: float | None = None, **flower: Any) -> None:
        minima = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
        super().__init__(**{**minima, **flower})
        self.max_update_norm = max_update_norm
        self.reference: Arrays = {}
        self.outcome = RoundOutcome()
        self.asked = 0
        """Sites asked in this round, whether or not they answer."""
        self.watchers: list[Watch] = []
        """See each reply that was folded, while its update is still there: for what wraps this strategy."""
        self.bounds, self.sums = BoundsConfig(), SumsConfig()
        """The experiment's; whoever assembles a run sets them."""
        self.running: RunningBounds | None = None
        """Bounds that follow from former rounds; None outside the curriculum and in mode client_central."""
        self.most_replies = 1024
        """What the sums of this round have to hold, known before the first reply."""
        self.masked: MaskedRounds | None = None
        """Makes the rounds under `secure`; set by strategies of which the server needs the sum alone."""
        self.members: frozenset[str] | None = None
        """The sites of the group that this strategy serves; None: all."""
        self._quorum = 1
        self._stamp: Stamp | None = None
        self._names: dict[int, str] = {}
        self._integers: dict[str, Array] = {}
        self._exchange = Exchange()

    # what a method changes

    def attach(self, services: Services) -> None:
        """The server lends its services, once, before the first task or a resume. Default: nothing."""

    def begin_task(self, task: TaskStart) -> None:
        """A task begins; state that has the model's shape grows here. Default: nothing."""

    def requests(self, request: TrainRequest, sites: Sequence[str]) -> dict[str, TrainRequest]:
        """The request of each site, made of the plain one; default: the plain one for all, with measurements.

        Sites that get the same request share one object, so that a model is serialised once.
        """
        return dict.fromkeys(sites, asking(request, self.measurements) if self.measurements else request)

    @property
    def measurements(self) -> Sequence[str]:
        """What sites are asked to report beside their updates; default: all that the method may ask for."""
        return self.asks.measurements

    @property
    def turns(self) -> TakesTurns | None:
        """This strategy as one whose sites train one after the other; None where they train side by side."""
        return None

    @property
    def rule(self) -> "RobustRule | None":
        """This strategy as a rule that can also combine means of updates; None where it is none."""
        return None

    @property
    def closed_form(self) -> "Analytic | None":
        """This strategy as one that solves from sums, which can be taken back; None where it trains."""
        return None

    def weight(self, reply: Admitted) -> float:
        """How much one update counts beside the others; default: its samples."""
        return float(reply.num_examples)

    def check_layers(self, arrays: Arrays) -> None:
        """Raises ConfigError when the method cannot work on a model of these tensors. Default: it can."""

    def serve_group(self, whole: Any, own: Arrays, former: Any) -> None:
        """Serve a group of the sites that `whole`, of this class and settings, serves; members says which.

        own: layers that stay at the sites, as the global model has them; self.reference lacks them. former:
        who served these sites in the task before, where the group goes on from there. Called after attach
        and before begin_task or load_state_dict. Default: nothing is taken over.
        """

    @property
    def task_complete(self) -> bool:
        """Whether nothing more can come of the present task, so that its further rounds are left out."""
        return False

    def prepare_round(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        """Exchanges with the sites that are over before the round's requests go out. Default: none.

        outcome: gets their bytes and warnings; the round's own come on top.
        """

    def begin_round(self) -> None:
        """A round begins; self.reference is the model that goes out."""
        raise NotImplementedError

    def while_waiting(self) -> None:
        """The round's requests are out; work that needs no reply is done here. Default: nothing."""

    def fold(self, reply: Admitted) -> None:
        """Take one reply into the aggregate, and keep nothing of its size."""
        raise NotImplementedError

    def close_round(self) -> int:
        """No more replies come; returns how many there are, with what was made in place of missing ones."""
        return len(self.outcome.participants)

    def finish_round(self) -> dict[str, Tensor]:
        """The new global model. Called only with a quorum of replies folded."""
        raise NotImplementedError

    def take_sum(self, total: Arrays, weight: float) -> dict[str, Tensor]:
        """The new global model from an opened sum.

        Called only under `secure`, which is refused for strategies that need single updates.

        total: sum of the weighted updates, float64.
        weight: sum of their weights.
        """
        raise NotImplementedError

    def largest_weight(self) -> float:
        """The largest factor by which one site's update can enter the new model of this round.

        It holds whatever the sites report and whoever answers; noise at the server is sized by it. The bound
        must hold with every other site's weight unchanged by that site: weights fixed in public, over a
        public divisor.

        Raises PrivacyError if the method has no such bound, which is the default.
        """
        raise PrivacyError(
            f"strategy: {type(self).__name__} does not bound the weight of one site, so noise at the server "
            "cannot be sized for it; privacy.mode client_central goes with fedavg"
        )

    def disclosures(self) -> Disclosures:
        """What replies carry in the clear; default: all that the method may ask for."""
        uploads = dict.fromkeys((*self.asks.clear_uploads, *self.asks.measurements))
        return Disclosures(clear_uploads=tuple(uploads))

    def group_models(self) -> dict[str, Arrays]:
        """The models that the server keeps for groups of sites beside the global one; default: none."""
        return {}

    def summary_blocks(self) -> dict[str, Any]:
        """Blocks of summary.json that this method fills, by name; see server/report/method_blocks.py."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs: tensors and JSON-able values by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state_dict()."""

    def sum_grid(self, largest_weight: float = 1.0) -> SumGrid:
        """The grid of this round's sums. largest_weight: by which an update may be multiplied."""
        return self.sums.grid(self.most_replies, largest_weight)

    # a round under the curriculum

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Send, receive and aggregate one round."""
        start = time.monotonic()
        prepared = RoundOutcome()
        self.prepare_round(grid, request, prepared)
        self.reference = request.arrays
        self._stamp, self._quorum, self._integers = request.stamp, request.quorum, {}
        common = TrainRequest(
            **request.stamp.stamp_fields,
            arrays=Tensors(request.arrays),
            progress=request.progress,
            clip_norm=request.clip_norm,
        )
        if self.masked is not None:
            outcome = self.masked.train_round(self, grid, request, common)
            outcome.seconds = time.monotonic() - start
            return outcome
        if self.waits_for_busy_sites:
            self._exchange.settle(grid, request.sites, request.quorum)
        asked = {site: node for site, node in request.sites.items() if not self._exchange.busy(site)}
        # a site that still works on an earlier round is not asked, and is named when its late reply comes
        self._names |= {node: site for site, node in request.sites.items()}
        self.asked, self.most_replies = len(asked), request.most_replies
        made: dict[str, TrainRequest] = {}
        for sites, fields in request.previous.fields_for(asked):
            made |= self.requests(replace(common, **fields), sites)
        requests = [(site, node, made[site]) for site, node in asked.items()]
        bytes_down = sum(message.tensor_bytes for _, _, message in requests)
        replies = self._exchange.train(grid, requests, request.deadline, self.while_waiting)
        arrays, _ = self.aggregate_train(request.stamp.round, (reply for _, reply in replies))
        outcome = self.outcome
        answered = {*outcome.participants, *(s for s, _ in outcome.dropped), *(s for s, _ in outcome.refused)}
        outcome.absent = [site for site in request.sites if site not in answered]
        outcome.bytes_up += prepared.bytes_up
        outcome.bytes_down = prepared.bytes_down + bytes_down
        outcome.warnings = prepared.warnings + outcome.warnings
        outcome.seconds = time.monotonic() - start
        if arrays is not None:
            outcome.arrays = unpack(arrays, "aggregate")
        return outcome

    def begin_round_of(self, inner: "IncrementalStrategy", reference: Arrays, outcome: RoundOutcome) -> None:
        """This round begins for a strategy inside this one, with its part of the model and of the outcome."""
        inner.begin_part(
            RoundPart(
                reference,
                outcome,
                self.asked,
                self.most_replies,
                self._stamp,
                self._names,
                self.max_update_norm,
                self.bounds,
                self.sums,
            )
        )

    def begin_part(self, part: RoundPart) -> None:
        """A round begins in which this strategy works inside another one."""
        self.reference, self.outcome = part.reference, part.outcome
        self.asked, self.most_replies = part.asked, part.most_replies
        self._stamp, self._names = part.stamp, dict(part.names)
        self.max_update_norm, self.bounds, self.sums = part.max_update_norm, part.bounds, part.sums
        self.begin_round()

    def _take(self, reply: Admitted) -> None:
        """Bound a reply, fold it, and show it to the watchers."""
        outcome, site = self.outcome, reply.site
        try:
            if self.running is not None:
                reply = self.running.bounded(reply, self.takes_parts)
            self.fold(reply)
            for watch in self.watchers:
                watch(reply, self.reference, 1)
        except (Rejected, OverflowError) as rejection:
            outcome.dropped.append((site, str(rejection)))
        else:
            outcome.warnings += [f"site {site}: {note}" for note in reply.notes]
            outcome.bytes_up += byte_count(reply.update) + byte_count(reply.method)
            # the update itself is not kept: memory must not grow with the number of sites
            outcome.participants[site] = replace(reply, update={}, method={})

    # Flower's own hooks

    def require_flowers_round(self) -> None:
        """Raises ConfigError where the method needs more than Flower's own start() gives it."""
        if self.needs:
            raise ConfigError(
                f"strategy {type(self).__name__}: needs {self.needs}, which Flower's own start() with "
                "another ClientApp does not give; it would run another method under this name. Run it with "
                "`perennial run` or as a Perennial app; docs/interop.md lists the strategies that work here"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's own round: remembers the model that goes out.

        Raises ConfigError if the method needs more than Flower's own round has.
        """
        self.require_flowers_round()
        self.reference = {
            name: tensor for name, tensor in unpack(arrays, "model").items() if tensor.is_floating_point()
        }
        self._integers = {name: array for name, array in arrays.items() if name not in self.reference}
        self._stamp, self._quorum, self._names = None, 1, {}
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.asked = self.most_replies = len(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Gate and fold replies as they come.

        Returns (None, None) when fewer than a quorum pass; the model then stays.
        """
        self.outcome = outcome = RoundOutcome()
        gate = Gate(
            self.reference, self._stamp, self.max_update_norm, self.staleness, self.bounds.max_samples
        )
        self.begin_round()
        waiting = WaitingReplies.needed(self.running, self.reference)
        for message in replies:
            node, asked = message.metadata.src_node_id, self._exchange.asked
            site = asked.get(message.metadata.reply_to_message_id) or self._names.get(node, f"node-{node}")
            try:
                reply = gate.admit(message, site)
            except Refused as refusal:
                outcome.refused.append((site, str(refusal)))
            except Rejected as rejection:
                outcome.dropped.append((site, str(rejection)))
            else:
                if waiting is None:
                    self._take(reply)
                else:
                    waiting.add(reply)
        if waiting is not None:
            for reply in waiting.counting():
                self._take(reply)
        count = self.close_round()
        if self._stamp is None:
            self._log_failures()
            self._require_a_reply(server_round)
        if count < self._quorum:
            return None, None
        record = pack(self.finish_round())
        for name, array in self._integers.items():
            record[name] = array
        loss = outcome.train_loss
        return record, MetricRecord({} if loss is None else {"train_loss": loss})

    def _require_a_reply(self, server_round: int) -> None:
        """Raise ConfigError if nothing of a first round could be used: the next rounds would end alike."""
        failures = [*self.outcome.dropped, *self.outcome.refused]
        if server_round == 1 and failures and not self.outcome.participants:
            site, reason = failures[0]
            raise ConfigError(
                f"round 1: none of {len(failures)} replies could be used, so no model follows; "
                f"{site}: {reason}"
            )

    def _log_failures(self) -> None:
        """In the words of Flower's own strategies, because under start() nobody reads the outcome."""
        failures = [*self.outcome.dropped, *self.outcome.refused]
        results = len(self.outcome.participants)
        log(INFO, "aggregate_train: Received %s results and %s failures", results, len(failures))
        for site, reason in failures:
            log(WARNING, "\t> Dropped the reply of %s: %s", site, reason)
        for sentence in self.outcome.warnings:
            log(WARNING, "\t> %s", sentence)
