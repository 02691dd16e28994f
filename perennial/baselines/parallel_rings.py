"""Rings side by side: each sub-ring hands its own model on, and the round's model is their mean.

A round of one ring of n sites takes n hops, one after the other. R sub-rings take n / R hops, each of all
sub-rings at once, and cost some of what a ring gains over averaging.
"""

import time
from typing import Any, Literal

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.ring.chain import SLOWEST_POLL
from perennial.strategies.round.exchange import Exchange
from perennial.strategies.round.gate import Admitted, Gate, Refused, Rejected
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.request import Arrays, RoundRequest
from perennial.strategies.round.run_context import RunContext
from perennial.strategies.round.traits import Traits


class ParallelRings(IncrementalStrategy):
    """theta + sum_r n_r (theta_r - theta) / sum_r n_r, with theta_r the model at the end of sub-ring r.

    n_r is the number of samples of the turns that sub-ring r took. A site that fails is skipped: its sub-ring
    goes on with the last valid model. A round that was stopped begins anew.

    rings: sub-rings; the sites are dealt to them in turn.
    reshuffle: "round" draws the order of the sites, and so their sub-rings, anew in each round, from a
    secret of the run; "never" keeps the sites' own order.
    """

    asks = ASKS["parallel_rings"]
    # a sub-ring goes on without a site that is busy
    traits = Traits(
        aggregates_in_parallel=False,
        waits_for_busy_sites=False,
        requires="sites that train on a model which another one of the same round handed over",
    )

    def __init__(
        self,
        rings: int = 2,
        reshuffle: Literal["round", "never"] = "round",
        max_update_norm: float | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(max_update_norm, **flower)
        if rings < 1:
            raise ValueError(f"rings: found {rings}, allowed 1 and more")
        self.rings = rings
        self.reshuffle: Literal["round", "never"] = reshuffle
        self.exchange = Exchange(slowest_poll=SLOWEST_POLL)

    def attach(self, run: RunContext) -> None:
        """Prepare for a run. Raises ConfigError when there are more sub-rings than sites."""
        super().attach(run)
        sites = run.experiment.data.sites
        if sites is not None and self.rings > sites:
            raise ConfigError(
                f"strategy.rings: found {self.rings}, allowed 1 to {sites}, the number of sites"
            )

    def order(self, request: RoundRequest) -> list[list[str]]:
        """The sites of each sub-ring, in the order of their turns."""
        sites = list(request.sites)
        if self.reshuffle == "round":
            drawn = stream(self.run.secret_seed, "ring-order", request.stamp.round).permutation(len(sites))
            sites = [sites[index] for index in drawn]
        return [sites[first :: self.rings] for first in range(min(self.rings, len(sites)))]

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """One turn of every sub-ring at a time, until all sites have had theirs."""
        start = time.monotonic()
        outcome = RoundOutcome(asked=len(request.sites))
        rings = self.order(request)
        models: list[Arrays] = [request.arrays] * len(rings)
        weights = [0.0] * len(rings)
        for turn in range(max(map(len, rings), default=0)):
            at = {ring[turn]: number for number, ring in enumerate(rings) if turn < len(ring)}
            replies = self._turns(grid, request, {site: models[ring] for site, ring in at.items()}, outcome)
            for reply in self._bounded(request, replies, outcome):
                ring = at[reply.site]
                for observer in request.observers:
                    observer(reply, models[ring], 1)
                models[ring] = {name: tensor + reply.update[name] for name, tensor in models[ring].items()}
                weights[ring] += self.weight(reply)
                outcome.take(reply)
        if len(outcome.participants) >= request.quorum:
            outcome.arrays = mean_model(request.arrays, models, weights)
        outcome.details["rings"] = rings
        outcome.seconds = time.monotonic() - start
        return outcome

    def _turns(
        self, grid: Grid, request: RoundRequest, models: dict[str, Arrays], outcome: RoundOutcome
    ) -> list[Admitted]:
        """The replies of sites that train at the same time, each on its own model, in the order of models."""
        # a reply that comes late belongs to a model that has moved on
        self.exchange.late.clear()
        asked = [site for site in models if not self.exchange.busy(site)]
        messages = [
            request.message(models[site], **request.previous.fields(held=site in request.previous.holders))
            for site in asked
        ]
        outcome.bytes_down += sum(message.tensor_bytes for message in messages)
        found: dict[str, Admitted] = {}
        silent = set(models)
        requests = [
            (site, request.sites[site], message) for site, message in zip(asked, messages, strict=True)
        ]
        for site, reply in self.exchange.run(grid, requests, request.deadline):
            silent.discard(site)
            gate = Gate(
                models[site], request.stamp, self.norm_bound(request), max_samples=request.bounds.max_samples
            )
            try:
                found[site] = gate.admit(reply, site)
            except Refused as refusal:
                outcome.refused.append((site, str(refusal)))
            except Rejected as rejection:
                outcome.dropped.append((site, str(rejection)))
        outcome.absent += [site for site in models if site in silent]
        return [found[site] for site in models if site in found]

    def _bounded(
        self, request: RoundRequest, replies: list[Admitted], outcome: RoundOutcome
    ) -> list[Admitted]:
        """The replies as they count; in a run's first round each is bounded by the turns so far."""
        if request.running is None:
            return replies
        if request.running.waiting:
            request.running.see_all([*outcome.participants.values(), *replies])
        kept = []
        for reply in replies:
            try:
                kept.append(request.running.bounded(reply, self.traits.accepts_scaled_updates))
            except Rejected as rejection:
                outcome.dropped.append((reply.site, str(rejection)))
        return kept


def mean_model(start: Arrays, models: list[Arrays], weights: list[float]) -> dict[str, Tensor]:
    """start + the weighted mean of the models' differences from it; a model of weight 0 is left out.

    Added in the order of the sub-rings, in float64, so that no order of arrival changes a bit.
    Raises ValueError if all weights are 0.
    """
    total = sum(weights)
    if not total > 0:
        raise ValueError(f"weights: found {weights}, allowed one above 0 at least")
    return {
        name: (
            tensor.double()
            + sum(
                (weight / total) * (model[name].double() - tensor.double())
                for model, weight in zip(models, weights, strict=True)
            )
        ).to(tensor.dtype)
        for name, tensor in start.items()
    }
