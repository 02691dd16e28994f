"""FedDig: the digests that an absent site has lent stand in for it, under any base strategy.

While a round's replies are awaited, the server trains a copy of the model on the digests of each absent site,
with inputs that a guidance producer makes of them; the base strategy takes the result as that site's update.
After aggregation the server trains model and producer together on all digests that it keeps, which keeps old
classes alive even when nobody is absent. Hsu, Chang and Chen 2022 (arXiv 2210.00737).

Inside clusters each cluster has a producer of its own, begun as a copy of the one of all sites, and stand-ins
for its own sites. Layers that stay at the sites are then the server's own: begun as the global model's,
trained with the rest on all digests of the cluster, and sent to nobody.
"""

import copy
import math
from dataclasses import replace
from typing import Any, Literal

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.foundation.streams import stream
from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from perennial.models.layers import with_rows
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.digests.carried_over import CarriedOver
from perennial.strategies.digests.lending import DigestLending
from perennial.strategies.digests.recall import Momentum, Recall, epochs_of_a_site
from perennial.strategies.digests.spread import spread_factor
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.nested_state import nested, part
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.previous import PreviousModel
from perennial.strategies.round.request import Arrays, RoundRequest, TaskStart
from perennial.strategies.round.services import Services
from perennial.strategies.wrapper import Wrapper


class DigestSynthesis(Wrapper):
    """FedDig: wraps a strategy, and lets the digests of absent sites stand in for them.

    base: what combines the updates.
    recall_epochs: over an absent site's digests; "auto" as many as give it the steps of a site that has the
    samples in them.
    server_epochs: over all digests, after aggregation; 0 leaves the aggregate and the guidance as they are.
    weights: "uniform" counts every site alike, absent or not; "samples" by what it trains on, an absent one
    by the samples in its digests.
    server_lr: of the model; None takes the learner's.
    guidance_lr: of the guidance producer; None takes server_lr's.
    spread: give digests of one class the variance of single samples back before training on them; the paper
    does not.
    held_out: n leaves every n-th digest of a site and task out of training; a round in which no site takes
    part then counts only if it lowers the loss on these. 0 trains on all, without an end, as the paper.
    """

    asks = ASKS["digest_synthesis"]
    needs = "digests from the sites"

    def __init__(
        self,
        base: IncrementalStrategy,
        recall_epochs: int | Literal["auto"] = 1,
        server_epochs: int = 1,
        server_lr: float | None = None,
        guidance_lr: float | None = None,
        server_momentum: float = 0.9,
        weights: Literal["uniform", "samples"] = "uniform",
        spread: bool = False,
        held_out: int = 0,
    ) -> None:
        super().__init__(base)
        if not base.combines_replies or base.stands_in:
            raise ValueError(
                f"base: {type(base).__name__} has rounds of its own kind, where nobody can stand in for an "
                "absent site; allowed: a strategy that only combines replies, such as fedavg"
            )
        rates = {"server_lr": server_lr, "guidance_lr": guidance_lr}
        for name, value, allowed in (
            ("recall_epochs", recall_epochs, recall_epochs == "auto" or recall_epochs >= 0),
            ("server_epochs", server_epochs, server_epochs >= 0),
            ("held_out", held_out, held_out == 0 or held_out >= 2),
            ("server_momentum", server_momentum, 0 <= server_momentum < 1),
            *((name, lr, lr is None or 0 < lr < math.inf) for name, lr in rates.items()),
        ):
            if not allowed:
                raise ValueError(f"{name}: found {value}, which is out of range")
        self.stands_in = True
        self.weights, self.spread, self.held_out = weights, spread, held_out
        self.recall_epochs: int | Literal["auto"] = recall_epochs
        self.server_epochs = server_epochs
        self.server_lr, self.guidance_lr, self.server_momentum = server_lr, guidance_lr, server_momentum
        self._services: Services | None = None
        self._lending: DigestLending | None = None
        self._whole: DigestSynthesis | None = None
        self._own: dict[str, Tensor] = {}
        self._recall: Recall | None = None
        self._request: RoundRequest | None = None
        self._velocities: tuple[Tensor | None, Tensor | None] = (None, None)
        self._withdrawals = 0
        self._stood_in: dict[str, float] = {}
        self._verdict: dict[str, Any] = {}

    # the life of a run

    def attach(self, services: Services) -> None:
        """Raises ConfigError where the experiment cannot make or read digests."""
        experiment = services.experiment
        self._lending = DigestLending(services)
        if experiment.model.name != "digest_two_branch":
            raise ConfigError(
                f"model.name: found {experiment.model.name!r}; strategy digest_synthesis reads digests with "
                "digest_two_branch, around any backbone"
            )
        if needed := sorted(set(self.base.disclosures().clear_uploads) - {"steps"}):
            raise ConfigError(
                f"strategy.base: {type(self.base).__name__} weighs sites by their {', '.join(needed)}, "
                "which a stand-in has not; choose a base that needs updates, sample counts and steps only"
            )
        if self.spread and self._lending.digests.protects:
            raise ConfigError(
                f"strategy.spread: with digests.protection {self._lending.digests.protection!r} it would "
                "spread the noise too; allowed false"
            )
        if experiment.learner.optimizer.name != "sgd":
            raise ConfigError("learner.optimizer.name: digest_synthesis trains with sgd, as its sites must")
        self._services = services
        self._begin_guidance()
        super().attach(services)

    def serve_group(self, whole: Any, own: Arrays, former: Any) -> None:
        """Begin as the strategy of one group of sites, with the digests that `whole` has borrowed.

        Its guidance begins as that of `whole`. If it continues a former group, it takes that one's guidance
        and the server's own layers.

        own: what the server's own copy of the sites' layers begins as, and its rows of new classes.
        """
        source = (former or whole).carried_over()
        self._whole, self._lending, self._own = whole, source.lending, dict(own)
        self._guidance.load_state_dict(source.guidance)
        self._withdrawals = source.withdrawals
        if former is not None:
            self._own = {name: with_rows(source.own[name], tensor) for name, tensor in own.items()}
            self._velocities = (None, source.velocity)
        super().serve_group(whole, own, former)

    def carried_over(self) -> CarriedOver:
        """What one that goes on from here takes over; nothing that was trained on withdrawn digests."""
        assert self._lending is not None
        self.forget_withdrawn()
        return CarriedOver(
            self._lending, self._guidance.state_dict(), self._withdrawals, self._own, self._velocities[1]
        )

    def largest_weight(self) -> float:
        """Raises PrivacyError: the server trains on the exact aggregate before noise could be added to it."""
        raise PrivacyError(
            "strategy: digest_synthesis trains on the aggregate before the server's noise, so one site's "
            "influence has no bound; privacy.mode client_central goes with fedavg"
        )

    def begin_task(self, task: TaskStart) -> None:
        """The model has grown: its velocity has another shape, and starts anew."""
        self._recall = None
        self._velocities = (None, self._velocities[1])
        super().begin_task(task)

    # one round, whose exchange is this strategy's own

    train_round = IncrementalStrategy.train_round
    configure_train = IncrementalStrategy.configure_train
    aggregate_train = IncrementalStrategy.aggregate_train

    def prepare_round(self, grid: Grid, request: RoundRequest, outcome: RoundOutcome) -> None:
        """Borrow the digests of this task from sites that have not been asked."""
        self._request = replace(request, arrays={}, previous=PreviousModel())
        super().prepare_round(grid, request, outcome)
        if self._whole is None:
            assert self._lending is not None
            outcome.bytes_up += self._lending.borrow(grid, request, outcome.warnings)
        self.forget_withdrawn()

    def begin_round(self) -> None:
        self._stood_in, self._verdict = {}, {}
        super().begin_round()

    def while_waiting(self) -> None:
        """Stand in for sites that are known to be away."""
        super().while_waiting()
        if self._request is None:
            return
        there = {*self._request.sites, *self._request.resting}
        for site in self._lenders():
            if site not in there:
                self._stand_in(site)

    def fold(self, reply: Admitted) -> None:
        if reply.site in self._stood_in:
            raise Rejected("the site's digests stand in for it in this round already")
        if reply.metrics.get("digests") == "withdrawn" and self._lending is not None:
            self._lending.withdraw(reply.site, self.outcome.warnings)
        self.base.fold(self._weighted(reply))

    def close_round(self) -> int:
        """Stand in for sites that were asked and did not answer; a stand-in counts as an answer."""
        answers = self.base.close_round()
        if self._request is None:
            return answers
        assert self._lending is not None
        self.forget_withdrawn()
        if self._whole is not None:
            self._whole.forget_withdrawn()
        heard = {*self.outcome.participants, *(site for site, _ in self.outcome.dropped)}
        for site in self._lenders():
            if site in self._request.sites and site not in heard:
                self._stand_in(site)
        for site, _ in self.outcome.refused:
            self._lending.ask_again(site)
        return answers + len(self._stood_in)

    def finish_round(self) -> dict[str, Tensor]:
        arrays = self._worth_keeping(self.base.finish_round())
        if self._request is not None:
            self.outcome.details["digests"] = {
                "stood_in": {site: round(loss, 6) for site, loss in sorted(self._stood_in.items())},
                "sites": self._lenders(),
                **self._verdict,
            }
        return arrays

    def _lenders(self) -> list[str]:
        """Sites of this strategy whose digests are there, in order of name."""
        if self._lending is None:
            return []
        return [site for site in self._lending.store.sites if self.members is None or site in self.members]

    def _weighted(self, reply: Admitted) -> Admitted:
        return reply if self.weights == "samples" else replace(reply, num_examples=1)

    def _stand_in(self, site: str) -> None:
        """The update of an absent site, from its digests."""
        recall, request, lending = self._networks(), self._request, self._lending
        assert self._services is not None and request is not None and lending is not None
        optimizer = self._services.experiment.learner.optimizer
        lr = optimizer.lr
        if optimizer.schedule == "cosine":
            lr *= 0.5 * (1 + math.cos(math.pi * request.progress))
        features, labels = self._gathered([site], request)
        epochs = self.recall_epochs
        if epochs == "auto":
            learner = self._services.experiment.learner
            epochs = epochs_of_a_site(lending.store.samples(site), len(features), learner)
        result = recall.stand_in(
            {**self._own, **self.reference},
            features,
            labels,
            epochs,
            Momentum(lr, optimizer.momentum, weight_decay=optimizer.weight_decay),
            stream(self._services.experiment.seed, "recall-batches", site, request.stamp.round),
        )
        if result is None:
            self.outcome.warnings.append(
                f"training on the digests of {site} diverged; nobody stood in for it"
            )
            return
        update, norm, steps, loss = result
        if self.max_update_norm is not None and norm > self.max_update_norm:
            self.outcome.warnings.append(
                f"nobody stood in for {site}: an update of norm {norm:.4g} is above max_update_norm "
                f"{self.max_update_norm:.4g}"
            )
            return
        samples, now = min(lending.store.samples(site), self.bounds.max_samples), request.stamp.round
        reply = Admitted(site, update, norm, samples, loss, steps, base_round=now, stand_in=True)
        try:
            self.base.fold(self._weighted(reply))
        except (Rejected, OverflowError) as rejection:
            self.outcome.warnings.append(f"nobody stood in for {site}: {rejection}")
            return
        self._stood_in[site] = loss
        lending.rounds_stood_in[site] = lending.rounds_stood_in.get(site, 0) + 1

    def _worth_keeping(self, aggregate: dict[str, Tensor]) -> dict[str, Tensor]:
        """The aggregate after the joint step; the old model if no site took part and nothing was gained."""
        request, sites, held = self._request, self._lenders(), None
        if request is not None and self.held_out and sites and not self.outcome.participants:
            held = self._gathered(sites, request, held=True)
        if held is None or not len(held[0]):
            return self._joint_step(aggregate)
        recall, own = self._networks(), self._own
        velocities = tuple(None if each is None else each.clone() for each in self._velocities)
        producer = recall.producer.vector.clone()
        before = recall.loss({**own, **self.reference}, *held)
        arrays = self._joint_step(aggregate)
        after = recall.loss({**self._own, **arrays}, *held)
        self._verdict = {"held_out_loss": [round(before, 6), round(after, 6)], "kept": after < before}
        if after < before:
            return arrays
        recall.producer.vector.copy_(producer)
        self._own, self._velocities = own, (velocities[0], velocities[1])
        return {name: self.reference[name].clone() for name in arrays}

    def _joint_step(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        sites = self._lenders()
        if self._request is None or not sites or not self.server_epochs:
            return arrays
        recall = self._networks()
        assert self._services is not None
        experiment = self._services.experiment
        lr = self.server_lr or experiment.learner.optimizer.lr
        model = Momentum(lr, self.server_momentum, self._velocities[0])
        producer = Momentum(self.guidance_lr or lr, self.server_momentum, self._velocities[1])
        trained = recall.joint_step(
            {**self._own, **arrays},
            *self._gathered(sites, self._request),
            self.server_epochs,
            (model, producer),
            stream(experiment.seed, "joint-batches", self._request.stamp.round),
        )
        if trained is None:
            self._velocities = (None, None)
            self.outcome.warnings.append(
                "training on all digests diverged and was left out; lower server_lr, or the digests' noise"
            )
            return arrays
        self._velocities = (model.velocity, producer.velocity)
        self._own = {name: trained[name] for name in self._own}
        return {name: trained[name] for name in arrays}

    def _gathered(self, sites: list[str], request: RoundRequest, held: bool = False) -> tuple[Tensor, Tensor]:
        """(features, labels) of digests to train on; held: of those that are left out."""
        assert self._services is not None and self._lending is not None
        spread_by = spread_factor(self._lending.digests) if self.spread else 1.0
        part = (self.held_out, held) if self.held_out else None
        features, labels = self._lending.store.gathered(sites, request.stamp.num_classes, spread_by, part)
        return features.to(self._services.device), labels.to(self._services.device)

    def _networks(self) -> Recall:
        """The server's networks for this task's number of classes."""
        services = self._services
        assert services is not None
        if self._recall is None:
            model = copy.deepcopy(services.load({**self._own, **self.reference}))
            assert isinstance(model, DigestTwoBranchModel)
            correction = services.experiment.learner.correction
            self._recall = Recall(
                model,
                self._guidance,
                services.constants,
                services.experiment.learner.batch_size,
                correction.mu if correction is not None else 0.0,
                self._own.keys(),
            )
        return self._recall

    def forget_withdrawn(self) -> None:
        """What was trained on withdrawn digests and goes on starts anew: guidance and velocities.

        The model keeps what it has learnt; only a run without the site is free of it.
        """
        if self._lending is not None and self._lending.withdrawals != self._withdrawals:
            self._begin_guidance()

    def _begin_guidance(self) -> None:
        assert self._services is not None and self._lending is not None
        shape, seed = self._services.input_shape, self._services.experiment.seed
        self._guidance = GuidanceProducer(shape, seed).to(self._services.device)
        self._velocities = (None, None)
        self._recall = None
        self._withdrawals = self._lending.withdrawals

    # what stays

    def summary_blocks(self) -> dict[str, Any]:
        """The base's blocks, and whose digests the server holds at what epsilon."""
        blocks = super().summary_blocks()
        return blocks if self._lending is None else blocks | {"digest": self._lending.summary_block()}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._lending is None:
            return state
        state |= nested("guidance", self._guidance.state_dict()) | nested("own", self._own)
        for name, velocity in zip(("model", "producer"), self._velocities, strict=True):
            if velocity is not None:
                state[f"velocity/{name}"] = velocity
        state["withdrawals"] = self._withdrawals
        return state if self._whole is not None else state | self._lending.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._services is None or self._lending is None:
            return
        device = self._services.device
        self._guidance.load_state_dict(part("guidance", state))
        self._own = part("own", state)
        velocities = {name: velocity.to(device) for name, velocity in part("velocity", state).items()}
        self._velocities = velocities.get("model"), velocities.get("producer")
        self._withdrawals = state["withdrawals"]
        if self._whole is None:
            self._lending.load_state_dict(state)
