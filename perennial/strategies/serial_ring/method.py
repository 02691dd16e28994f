"""TriCon-SF: the model goes from site to site, and each one trains on where the one before it left off.

Yan et al. 2025 (arXiv 2506.16723), equations 5 to 9. The server relays every hand-over, because Flower has no
channel between sites; so it sees every intermediate model.

With one segment, a fixed order and no relabelling it is cyclic weight transfer (Chang et al. 2018, JAMIA
25(8)).
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.learning.scored import Worth
from perennial.models.incremental import select_travelling
from perennial.models.relabel import relabel
from perennial.protocol.tensors import count_bytes, unpack
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import Aggregator, RoundContext, RoundOutcome, RunContext
from perennial.strategies.round.gate import Admitted, Refused, Rejected
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart, Traits
from perennial.strategies.serial_ring.hop_log import Chain, Hop, RingCost, RingLog, Silent
from perennial.strategies.serial_ring.site import MOST_SEGMENTS, USUAL_SEGMENTS, Turn

NOISED = 0.5
"""Share of the layers of the first model that get noise."""
TELLING = 3
"""Turns whose median one dishonest site among them does not move."""


@dataclass(frozen=True)
class Weighing:
    """Which models of a ring's round are measured.

    weigh: from a model to its worth on each class; None if nobody could measure it. sweeps: those whose
    models are measured, around each turn. first: measure before a site gets the model, not while it works.
    """

    weigh: Callable[[Arrays], Worth | None]
    sweeps: frozenset[int]
    first: bool = False


class SerialRing(IncrementalStrategy):
    """The model goes through all sites once for each segment of their data; the last site returns the result.

    segments: how each site cuts its data (serial_ring/site.py). reshuffle: when a new order is drawn; "never"
    keeps the sites' own order. relabel: "permute" renames hidden neurons before each hand-over.
    init_noise_std: of noise on half of the layers of the first model.
    A site that fails is skipped: the last valid model goes on to the next one.
    """

    asks = ASKS["serial_ring"]
    # the ring goes on without a site that is busy
    traits = Traits(aggregates_in_parallel=False, waits_for_busy_sites=False)

    def __init__(
        self,
        segments: int = USUAL_SEGMENTS,
        reshuffle: Literal["sweep", "round", "never"] = "sweep",
        relabel: Literal["permute", "none"] = "permute",
        init_noise_std: float = 0.0,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        if not 1 <= segments <= MOST_SEGMENTS:
            raise ValueError(f"segments: found {segments}, allowed 1 to {MOST_SEGMENTS}")
        if not init_noise_std >= 0:
            raise ValueError(f"init_noise_std: found {init_noise_std}, allowed 0 and more")
        self.segments, self.reshuffle, self.relabel = segments, reshuffle, relabel
        self.init_noise_std = init_noise_std
        self.hop_timeout: float | None = None
        """Seconds for a hop under Flower's own start(), which tells a strategy no deadline."""
        self.weighing: Weighing | None = None
        """How the turns of a round are valued; None: they are not. The strategy around this one sets it."""
        self._chain = Chain()
        self._cost = RingCost()

    def attach(self, run: RunContext) -> None:
        privacy = run.experiment.privacy
        if privacy.mode != "none" and self.segments > 1:
            raise ConfigError(
                f"strategy.segments: found {self.segments} with privacy.mode "
                f"{privacy.mode!r}; allowed 1, because every turn is a release of its "
                "own and a site's account counts one in a round"
            )
        super().attach(run)

    def begin_task(self, task: TaskStart) -> None:
        if self.relabel == "permute" and self.attached:
            # a model without a known labelling is refused now, and not after the first site has trained
            self._relabel_model(task.reference, 0, 0, 0)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Run one round: `segments` sweeps over all sites, one message at a time.

        A round that was stopped goes on at its hop.
        """
        start = time.monotonic()
        log = RingLog.open(self.run.folder, request.stamp, request.arrays)
        if not log.route:
            log.route = [list(self.order(request, sweep)) for sweep in range(1, self.segments + 1)]
            log.arrays = self._prepare_model(request.arrays)
        hops = [
            (sweep, position, site)
            for sweep, row in enumerate(log.route, 1)
            for position, site in enumerate(row)
        ]
        for sweep, position, site in hops[len(log.hops) :]:
            self._bound_first_turns(log, request)
            log.add(self._run_hop(grid, request, site, sweep, position, log))
        outcome = log.build_outcome(request.sites)
        if len(outcome.participants) >= request.quorum:
            outcome.arrays = dict(log.arrays)
            if self.weighing is not None and log.last_sweep in self.weighing.sweeps:
                weigh_model(log, self.weighing)
                outcome.details["worth"] = log.worth
            turns = sum(hop.kind == "taken" for hop in log.hops)
            sent = outcome.bytes_up + outcome.bytes_down
            self._cost.add(turns, sent, count_bytes(log.arrays), len(request.sites))
        outcome.seconds = time.monotonic() - start
        return outcome

    def _bound_first_turns(self, log: RingLog, request: RoundRequest) -> None:
        """Bound the turns of a run's first round by those before them, because there is no former round.

        Nothing bounds the first turns of all. As soon as the next ones show that one of them was too large,
        the ring begins anew without them.
        """
        running = request.running
        if running is None or not running.waiting:
            return
        turns = [hop.reply for hop in log.hops if hop.kind == "taken"]
        running.see_all(turns)
        if len(turns) != TELLING:
            return
        largest = max(turns, key=lambda turn: turn.norm)
        if running.is_over_bound(largest.norm):
            log.begin_anew(
                self._prepare_model(request.arrays),
                f"the ring began anew, because the update of {largest.site} was above bounds.norm_multiple "
                f"times the median of the first {TELLING} turns",
            )

    def order(self, request: RoundRequest, sweep: int) -> tuple[str, ...]:
        """The sites in the order of one sweep."""
        sites = tuple(request.sites)
        if self.reshuffle == "never":
            return sites
        ids = (request.stamp.round, sweep) if self.reshuffle == "sweep" else (request.stamp.round,)
        return tuple(sites[i] for i in stream(self._seed, "ring-order", *ids).permutation(len(sites)))

    def turn(
        self,
        grid: Grid,
        request: RoundRequest,
        site: str,
        arrays: Arrays,
        sweep: int,
        holds_previous: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[Admitted, int]:
        """Have one site train from arrays: (its reply, bytes sent to it). meanwhile: called while it works.

        Raises Refused, Rejected or Silent.
        """
        turn = Turn(sweep=sweep, segments=self.segments)
        admitted = self._chain.turn(
            grid,
            request,
            site,
            arrays,
            settings=json.dumps({"turn": turn.model_dump()}),
            held=holds_previous,
            max_update_norm=request.max_update_norm,
            meanwhile=meanwhile,
        )
        if request.running is not None:
            admitted = request.running.bound_reply(admitted, scalable=True)
        return admitted, self._chain.sent

    def _run_hop(
        self, grid: Grid, request: RoundRequest, site: str, sweep: int, position: int, log: RingLog
    ) -> Hop:
        """One site's turn; on success log.arrays is the model that goes on."""
        holds = site in request.previous.holders or log.has_trained(site)
        try:
            weighing = self.weighing
            if weighing is None or not {sweep, log.last_sweep} & weighing.sweeps:
                reply, sent = self.turn(grid, request, site, log.arrays, sweep, holds)
            elif weighing.first:
                weigh_model(log, weighing)
                reply, sent = self.turn(grid, request, site, log.arrays, sweep, holds)
            else:
                weigh = partial(weigh_model, log, weighing)
                reply, sent = self.turn(grid, request, site, log.arrays, sweep, holds, weigh)
        except Refused as refusal:
            return Hop(site, sweep, "refused", str(refusal))
        except Rejected as rejection:
            return Hop(site, sweep, "dropped", str(rejection))
        except Silent as silence:
            return Hop(site, sweep, "absent", str(silence))
        facts = {} if log.worth is None else {"worth": log.worth}
        for observer in request.observers:
            facts |= observer(reply, log.arrays, sweep)
        if reply.norm:
            # a zero update leaves the model's value unchanged, to the last bit
            log.worth = None
        after = apply_update(log.arrays, reply.update)
        if self.relabel == "permute":
            after = self._relabel_model(after, request.stamp.round, sweep, position)
        log.arrays = after
        received = count_bytes(reply.update)
        return Hop.of(reply, sweep, received, sent, facts)

    @property
    def _seed(self) -> int:
        return self.run.secret_seed if self.attached else 0

    def _relabel_model(self, arrays: Arrays, *ids: int) -> dict[str, Tensor]:
        model = self.run.load(arrays)
        relabel(model, stream(self._seed, "relabel", *ids))
        return {name: tensor.clone() for name, tensor in select_travelling(model).items()}

    def _prepare_model(self, arrays: Arrays) -> Arrays:
        """The model that the round starts from, perturbed once before the first round that succeeds."""
        if self._cost.rounds or not self.init_noise_std:
            return arrays
        return perturb_layers(arrays, self.init_noise_std, self._seed)

    # Flower's own start(): one sweep over the nodes, with any ClientApp; its apps know no segments

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Under Flower's start(), run all turns but the last, and return the last one's request."""
        messages = sorted(
            super().configure_train(server_round, arrays, config, grid),
            key=lambda message: message.metadata.dst_node_id,
        )
        if self.reshuffle != "never":
            order = stream(self._seed, "ring-order", server_round, 1).permutation(len(messages))
            messages = [messages[index] for index in order]
        for message in messages[:-1]:
            for reply in grid.send_and_receive([message], timeout=self.hop_timeout):
                after, _ = self.aggregate_train(server_round, [reply])
                if after is not None:
                    # all messages share one record, so the next one carries what this one brought
                    message.content[self.arrayrecord_key] = after
                    model = unpack(after, "model")
                    self._round.reference = {name: model[name] for name in self._round.reference}
        return messages[-1:]

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        """The aggregator of one turn's reply, under Flower's own start()."""
        return HandedOn(ctx)

    # what was sent, beside the paper's formulas

    def summary_blocks(self) -> dict[str, Any]:
        """The summary's block on the ring; see RingCost."""
        return {"ring": self._cost.block()}

    def state_dict(self) -> dict[str, Any]:
        return {"ring_cost": asdict(self._cost)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cost = RingCost(**state["ring_cost"])


class HandedOn(Aggregator):
    """Returns one site's model, for the next site to train."""

    def add(self, reply: Admitted) -> None:
        self._after = apply_update(self.ctx.reference, reply.update)

    def result(self) -> dict[str, Tensor]:
        return self._after


def weigh_model(log: RingLog, weighing: Weighing) -> None:
    """Measure the worth of the log's model, unless it is known."""
    if log.worth is None:
        log.worth = weighing.weigh(log.arrays)


def list_layers(arrays: Arrays) -> tuple[str, ...]:
    """Names of the modules that own tensors, in the model's order."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in arrays))


def apply_update(arrays: Arrays, update: Arrays) -> dict[str, Tensor]:
    """arrays + update."""
    return {name: tensor + update[name] for name, tensor in arrays.items()}


def perturb_layers(arrays: Arrays, std: float, seed: int) -> dict[str, Tensor]:
    """arrays with N(0, std^2) added on a drawn half of the layers (equation 7).

    The first model is random and knows no data, so this protects nothing; it is another initialisation.
    """
    names = list_layers(arrays)
    generator = stream(seed, "initial-noise")
    chosen = {names[i] for i in generator.permutation(len(names))[: round(NOISED * len(names))]}
    return {
        name: tensor + torch.from_numpy(generator.normal(0.0, std, tuple(tensor.shape))).to(tensor)
        if name.rpartition(".")[0] in chosen
        else tensor
        for name, tensor in arrays.items()
    }
