"""FedDig: an absent site goes on teaching through the digests that it has lent, under any base strategy.

While a round's replies are awaited, the server trains a copy of the model on the digests of each absent site,
with inputs that a guidance producer makes of them; the base strategy takes the result as that site's update.
After aggregation the server trains model and producer together on all digests that it keeps, which keeps old
classes alive even when nobody is absent. Hsu, Chang and Chen 2022 (arXiv 2210.00737).
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

from flwr.serverapp import Grid
from torch import Tensor

from foundation.errors import ConfigError, ProtocolError
from foundation.streams import stream
from models.digest_encoders import build_encoder, digest_shape, encoder_hash
from models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from protocol.messages import DigestReply, TrainRequest
from strategies.base import IncrementalStrategy, RoundOutcome, RoundRequest, TaskStart
from strategies.digest_collection import collect
from strategies.digest_report import digest_block
from strategies.digest_spread import spread_factor
from strategies.digest_store import DigestStore, checked
from strategies.disclosures import Disclosures
from strategies.exchange import Exchange
from strategies.gate import Admitted, Rejected
from strategies.recall import Momentum, Recall
from strategies.services import Services


class DigestSynthesis(IncrementalStrategy):
    """base: what combines the updates. recall_epochs: over an absent site's digests. server_epochs: over all
    digests, after aggregation; 0 leaves the aggregate and the guidance as they are.

    weights: "uniform" counts every site alike, absent or not; "samples" by what it trains on, an absent one
    by the samples in its digests. server_lr: of the model, None takes the learner's; guidance_lr: of the
    guidance producer, None takes server_lr's. spread: give digests of one class the variance of single
    samples back before training on them; the paper does not.
    """

    def __init__(
        self,
        base: IncrementalStrategy,
        recall_epochs: int = 1,
        server_epochs: int = 1,
        server_lr: float | None = None,
        guidance_lr: float | None = None,
        server_momentum: float = 0.9,
        weights: Literal["uniform", "samples"] = "uniform",
        spread: bool = False,
    ) -> None:
        super().__init__(max_update_norm=base.max_update_norm)
        if type(base).train_round is not IncrementalStrategy.train_round:
            raise ValueError(
                f"base: {type(base).__name__} has rounds of its own kind, where nobody can stand in for an "
                "absent site; allowed: a strategy that only combines replies, such as fedavg"
            )
        if min(recall_epochs, server_epochs) < 0:
            raise ValueError(
                f"recall_epochs, server_epochs: found {recall_epochs}, {server_epochs}; allowed 0 or more"
            )
        if not 0 <= server_momentum < 1:
            raise ValueError(f"server_momentum: found {server_momentum}, allowed 0 to below 1")
        for name, lr in (("server_lr", server_lr), ("guidance_lr", guidance_lr)):
            if lr is not None and not 0 < lr < math.inf:
                raise ValueError(f"{name}: found {lr}, allowed a number above 0")
        self.base, self.weights, self.spread = base, weights, spread
        self.staleness = base.staleness
        self.recall_epochs, self.server_epochs = recall_epochs, server_epochs
        self.server_lr, self.guidance_lr, self.server_momentum = server_lr, guidance_lr, server_momentum
        self.store = DigestStore()
        self._services: Services | None = None
        self._lending = Exchange()
        self._recall: Recall | None = None
        self._request: RoundRequest | None = None
        self._velocities: tuple[Tensor | None, Tensor | None] = (None, None)
        self._stood_in: dict[str, float] = {}
        self._notes: list[str] = []
        self._declined: dict[str, int] = {}
        self._to_ask_again: set[str] = set()
        self._rounds_stood_in: dict[str, int] = {}
        self._withdrawn: list[str] = []

    # the life of a run

    def attach(self, services: Services) -> None:
        """Raises ConfigError where the experiment cannot make or read digests."""
        experiment = services.experiment
        if experiment.digests is None:
            raise ConfigError("digests: missing; strategy digest_synthesis needs to know how they are made")
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
        if self.spread and experiment.digests.protects:
            raise ConfigError(
                f"strategy.spread: with digests.protection {experiment.digests.protection!r} it would spread "
                "the noise too; allowed false"
            )
        if experiment.learner.optimizer.name != "sgd":
            raise ConfigError("learner.optimizer.name: digest_synthesis trains with sgd, as its sites must")
        self._services = services
        encoder = build_encoder(experiment.encoder, services.input_shape, experiment.seed)
        self._encoder = encoder_hash(encoder)
        self._reset_guidance()
        self.base.attach(services)

    def disclosures(self) -> Disclosures:
        return self.base.disclosures()

    def begin_task(self, task: TaskStart) -> None:
        """The model has grown: its velocity has another shape, and starts anew."""
        self._recall = None
        self._velocities = (None, self._velocities[1])
        self._declined.clear()
        self.base.begin_task(task)

    def personalise(self, site: str, request: TrainRequest) -> TrainRequest:
        return self.base.personalise(site, request)

    def train_round(self, grid: Grid, request: RoundRequest) -> RoundOutcome:
        """Borrow the digests of this task from sites that have not been asked, then a round as any other."""
        self._request = request
        self._notes = []
        bytes_up = self._borrow(grid, request)
        outcome = super().train_round(grid, request)
        outcome.warnings += self._notes
        outcome.bytes_up += bytes_up
        # one that refuses to train may want its digests back too
        self._to_ask_again = {site for site, _ in outcome.refused if site in self.store.sites}
        self._request = None
        return outcome

    # one round

    def begin_round(self) -> None:
        self._stood_in = {}
        base = self.base
        base.reference, base.outcome = self.reference, self.outcome
        base.asked, base._quorum = self.asked, self._quorum
        base._stamp, base._names = self._stamp, self._names
        base.begin_round()

    def while_waiting(self) -> None:
        """Stand in for sites that are known to be away."""
        if self._request is None:
            return
        there = {*self._request.sites, *self._request.resting}
        for site in self.store.sites:
            if site not in there:
                self._stand_in(site)

    def fold(self, reply: Admitted) -> None:
        if reply.site in self._stood_in:
            raise Rejected("the site's digests stand in for it in this round already")
        if reply.metrics.get("digests") == "withdrawn":
            self._withdraw(reply.site)
        self.base.fold(self._weighted(reply))

    def close_round(self) -> bool:
        """Stand in for sites that were asked and did not answer; a stand-in counts as an answer."""
        if self._request is not None:
            heard = {*self.outcome.participants, *(site for site, _ in self.outcome.dropped)}
            for site in self.store.sites:
                if site in self._request.sites and site not in heard:
                    self._stand_in(site)
        return len(self.outcome.participants) + len(self._stood_in) >= self._quorum

    def finish_round(self) -> dict[str, Tensor]:
        arrays = self._joint_step(self.base.finish_round())
        if self._request is not None:
            self.outcome.details["digests"] = {
                "stood_in": {site: round(loss, 6) for site, loss in sorted(self._stood_in.items())},
                "sites": self.store.sites,
            }
        return arrays

    def _weighted(self, reply: Admitted) -> Admitted:
        return reply if self.weights == "samples" else Admitted(**{**vars(reply), "num_examples": 1})

    def _stand_in(self, site: str) -> None:
        """The update of an absent site, from its digests."""
        recall, request = self._networks(), self._request
        assert self._services is not None and request is not None
        optimizer = self._services.experiment.learner.optimizer
        lr = optimizer.lr
        if optimizer.schedule == "cosine":
            lr *= 0.5 * (1 + math.cos(math.pi * request.progress))
        result = recall.stand_in(
            self.reference,
            *self._gathered([site], request),
            self.recall_epochs,
            Momentum(lr, optimizer.momentum),
            stream(self._services.experiment.seed, "recall-batches", site, request.stamp.round),
        )
        if result is None:
            self._notes.append(f"training on the digests of {site} diverged; nobody stood in for it")
            return
        update, norm, steps, loss = result
        samples, now = self.store.samples(site), request.stamp.round
        reply = Admitted(site, update, norm, samples, loss, steps, base_round=now, stand_in=True)
        try:
            self.base.fold(self._weighted(reply))
        except (Rejected, OverflowError) as rejection:
            self._notes.append(f"nobody stood in for {site}: {rejection}")
            return
        self._stood_in[site] = loss
        self._rounds_stood_in[site] = self._rounds_stood_in.get(site, 0) + 1

    def _joint_step(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._request is None or not self.store.sites or not self.server_epochs:
            return arrays
        recall = self._networks()
        assert self._services is not None
        experiment = self._services.experiment
        lr = self.server_lr or experiment.learner.optimizer.lr
        model = Momentum(lr, self.server_momentum, self._velocities[0])
        producer = Momentum(self.guidance_lr or lr, self.server_momentum, self._velocities[1])
        trained = recall.joint_step(
            arrays,
            *self._gathered(self.store.sites, self._request),
            self.server_epochs,
            (model, producer),
            stream(experiment.seed, "joint-batches", self._request.stamp.round),
        )
        if trained is None:
            self._velocities = (None, None)
            self._notes.append(
                "training on all digests diverged and was left out; lower server_lr, or the digests' noise"
            )
            return arrays
        self._velocities = (model.velocity, producer.velocity)
        return trained

    def _gathered(self, sites: list[str], request: RoundRequest) -> tuple[Tensor, Tensor]:
        assert self._services is not None
        assert self._services.experiment.digests is not None
        spread_by = spread_factor(self._services.experiment.digests) if self.spread else 1.0
        features, labels = self.store.gathered(sites, request.stamp.num_classes, spread_by)
        return features.to(self._services.device), labels.to(self._services.device)

    def _networks(self) -> Recall:
        """The server's networks for this task's number of classes."""
        services = self._services
        assert services is not None
        if self._recall is None:
            model = copy.deepcopy(services.load(self.reference))
            assert isinstance(model, DigestTwoBranchModel)
            correction = services.experiment.learner.correction
            self._recall = Recall(
                model,
                self._guidance,
                services.constants,
                services.experiment.learner.batch_size,
                correction.mu if correction is not None else 0.0,
            )
        return self._recall

    # borrowing and giving back

    def _borrow(self, grid: Grid, request: RoundRequest) -> int:
        """Ask who has not lent this task's digests; returns the bytes received."""
        task = request.stamp.task
        asked = {
            site: node
            for site, node in request.sites.items()
            if site in self._to_ask_again
            or not (self.store.holds(site, task) or self._declined.get(site) == task)
        }
        replies, warnings, declined = collect(
            grid, self._lending, asked, request.stamp, self._encoder, request.deadline
        )
        self._notes += warnings
        self._declined |= dict.fromkeys(declined, task)
        bytes_up = 0
        for site, reply in replies.items():
            try:
                bytes_up += self._take(site, reply)
            except ProtocolError as error:
                self._declined[site] = task
                self._notes.append(f"digests of {site}: {error}")
        return bytes_up

    def _take(self, site: str, reply: DigestReply) -> int:
        """Keep or forget a site's digests, as it says; returns the bytes that came."""
        assert self._services is not None and self._services.experiment.digests is not None
        if reply.digests is None:
            self._declined[site] = reply.task
            self._withdraw(site)
            return 0
        if self.store.holds(site, reply.task):
            return 0
        shape = digest_shape(self._services.input_shape)
        digests = checked(reply, self._encoder, shape, self._services.experiment.digests.per_digest)
        self.store.put(site, reply.task, digests)
        if site in self._withdrawn:
            self._withdrawn.remove(site)
        return 4 * (digests.features.numel() + digests.labels.numel())

    def _withdraw(self, site: str) -> None:
        """Forget a site's digests, and what was trained on them and goes on: guidance and velocities.

        The model keeps what it has learnt; only a run without the site is free of it.
        """
        if self.store.drop(site):
            self._withdrawn.append(site)
            self._reset_guidance()
            self._notes.append(f"site {site} has withdrawn its digests; the guidance starts anew")

    def _reset_guidance(self) -> None:
        assert self._services is not None
        shape, seed = self._services.input_shape, self._services.experiment.seed
        self._guidance = GuidanceProducer(shape, seed).to(self._services.device)
        self._velocities = (None, None)
        self._recall = None

    # what stays

    def summary_blocks(self) -> dict[str, Any]:
        """Beside the base's: what is held of whom, at what honest epsilon."""
        blocks = self.base.summary_blocks()
        if self._services is not None and self._services.experiment.digests is not None:
            block = digest_block(
                self._services.experiment.digests,
                math.prod(digest_shape(self._services.input_shape)),
                self.store,
                self._rounds_stood_in,
                self._withdrawn,
            )
            name = self._services.experiment.encoder.name
            blocks = blocks | {"digest": {"encoder": f"{name}, SHA-256 {self._encoder:.12}"} | block}
        return blocks

    def state_dict(self) -> dict[str, Any]:
        state = {f"base/{name}": value for name, value in self.base.state_dict().items()}
        if self._services is None:
            return state
        for name, tensor in self._guidance.state_dict().items():
            state[f"guidance/{name}"] = tensor
        for name, velocity in zip(("model", "producer"), self._velocities, strict=True):
            if velocity is not None:
                state[f"velocity/{name}"] = velocity
        state["lending"] = {
            "declined": self._declined,
            "ask_again": sorted(self._to_ask_again),
            "rounds_stood_in": self._rounds_stood_in,
            "withdrawn": self._withdrawn,
        }
        return state | self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(_part(state, "base/"))
        if self._services is None:
            return
        device = self._services.device
        self._guidance.load_state_dict(_part(state, "guidance/"))
        velocities = _part(state, "velocity/")
        model, producer = velocities.get("model"), velocities.get("producer")
        self._velocities = (
            None if model is None else model.to(device),
            None if producer is None else producer.to(device),
        )
        lending = state["lending"]
        self._declined, self._to_ask_again = dict(lending["declined"]), set(lending["ask_again"])
        self._rounds_stood_in = dict(lending["rounds_stood_in"])
        self._withdrawn = list(lending["withdrawn"])
        self.store.load_state_dict(state)


def _part(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
