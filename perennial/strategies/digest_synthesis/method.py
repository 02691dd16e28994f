"""FedDig: the digests that an absent site has lent stand in for it, under any base strategy.

While a round's replies are awaited, the server trains a copy of the model on the digests of each absent site,
with inputs that a guidance producer makes of them; the base strategy takes the result as that site's update.
After aggregation the server trains model and producer together on all digests that it keeps, which keeps old
classes alive even when nobody is absent. Hsu, Chang and Chen 2022 (arXiv 2210.00737).

Inside clusters each cluster has a producer of its own, begun as a copy of the one of all sites, and stand-ins
for its own sites. Layers that stay at the sites are then the server's own: begun as the global model's,
trained with the rest on all digests of the cluster, and sent to nobody.
"""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from perennial.config.rounds import MAX_SAMPLES
from perennial.config.strategies import ASKS
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.strategies.base import IncrementalStrategy, Wrapper
from perennial.strategies.digest_synthesis.lending import DigestLending
from perennial.strategies.digest_synthesis.recall import ServerNetworks
from perennial.strategies.digest_synthesis.store import spread_factor
from perennial.strategies.round.context import Aggregator, Around, RoundContext, RunContext
from perennial.strategies.round.gate import Admitted, Rejected
from perennial.strategies.round.request import Arrays, TaskStart, Traits

RECALL_EPOCHS = 1
"""Over an absent site's digests."""


class DigestSynthesis(Wrapper):
    """FedDig: wraps a strategy, and lets the digests of absent sites stand in for them.

    base: what combines the updates.
    server_epochs: over all digests, after aggregation; 0 leaves the aggregate and the guidance as they are.
    server_lr: of the model; None takes the learner's.
    guidance_lr: of the guidance producer; None takes server_lr's.
    spread: give digests of one class the variance of single samples back before training on them; the paper
    does not.
    """

    asks = ASKS["digest_synthesis"]

    def __init__(
        self,
        base: IncrementalStrategy,
        server_epochs: int = 1,
        server_lr: float | None = None,
        guidance_lr: float | None = None,
        spread: bool = False,
    ) -> None:
        super().__init__(base)
        if not base.traits.aggregates_in_parallel or base.traits.imputes_absent_sites:
            raise ValueError(
                f"base: {type(base).__name__} has rounds of its own kind, where nobody can stand in for an "
                "absent site; allowed: a strategy that only combines replies, such as fedavg"
            )
        rates = {"server_lr": server_lr, "guidance_lr": guidance_lr}
        for name, value, allowed in (
            ("server_epochs", server_epochs, server_epochs >= 0),
            *((name, lr, lr is None or 0 < lr < math.inf) for name, lr in rates.items()),
        ):
            if not allowed:
                raise ValueError(f"{name}: found {value}, which is out of range")
        self.spread = spread
        self.server_epochs = server_epochs
        self.server_lr, self.guidance_lr = server_lr, guidance_lr
        self._whole: DigestSynthesis | None = None

    def adapted(self, base: Traits) -> Traits:
        return replace(base, imputes_absent_sites=True, requires="digests from the sites")

    # the life of a run

    def attach(self, run: RunContext) -> None:
        """Begin a run. Raises ConfigError if the experiment cannot make or read digests."""
        experiment, lending = run.experiment, DigestLending(run)
        if experiment.model.name != "digest_two_branch":
            raise ConfigError(
                f"model.name: found {experiment.model.name!r}; strategy digest_synthesis reads digests with "
                "digest_two_branch, around any backbone"
            )
        if needed := sorted(set(self.base.disclosures().clear_uploads) - {"steps"}):
            raise ConfigError(
                f"strategy.base: {type(self.base).__name__} weighs sites by their {', '.join(needed)}, "
                "which a stand-in does not have; choose a base that needs updates, sample counts and "
                "steps only"
            )
        if self.spread and lending.digests.protects:
            raise ConfigError(
                f"strategy.spread: with digests.protection {lending.digests.protection!r} it would "
                "spread the noise too; allowed false"
            )
        if experiment.learner.optimizer.name != "sgd":
            raise ConfigError("learner.optimizer.name: digest_synthesis trains with sgd, as its sites must")
        self.networks = ServerNetworks(run, lending)
        super().attach(run)

    def serve_group(self, whole: Any, own: Arrays, former: Any) -> None:
        """Begin as the strategy of one group of sites, with the digests that `whole` has borrowed.

        Its guidance begins as that of `whole`. If it continues a former group, it takes that one's guidance
        and the server's own layers. own: first values of the server's copy of the sites' layers, and of their
        rows of new classes.
        """
        self._whole = whole
        self.networks.inherit((former or whole).networks, own, as_former=former is not None)
        super().serve_group(whole, own, former)

    def begin_task(self, task: TaskStart) -> None:
        if self.attached:
            self.networks.grow()
        super().begin_task(task)

    # one round

    def prepare_round(self, ctx: RoundContext) -> None:
        """Borrow the digests of this task from sites that have not been asked."""
        super().prepare_round(ctx)
        if self._whole is None:
            lending, outcome = self.networks.lending, ctx.outcome
            outcome.bytes_up += lending.borrow(ctx.grid, ctx.request, outcome.warnings)
        self.networks.reset_after_withdrawal()

    def aggregator(self, ctx: RoundContext) -> Aggregator:
        base = self.base.aggregator(ctx)
        return StandIns(ctx, base, self) if self.attached else Counted(ctx, base, self)

    def reset_after_withdrawal(self) -> None:
        """Forget what was trained on withdrawn digests, in the networks of all sites and of groups."""
        self.networks.reset_after_withdrawal()
        if self._whole is not None:
            self._whole.networks.reset_after_withdrawal()

    # what stays

    def summary_blocks(self) -> dict[str, Any]:
        """The base's blocks, and one on the digests that the server holds and their epsilon."""
        blocks = super().summary_blocks()
        return blocks | {"digest": self.networks.lending.build_summary_block()} if self.attached else blocks

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.attached:
            return state
        state |= self.networks.state_dict()
        return state if self._whole is not None else state | self.networks.lending.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self.attached:
            return
        self.networks.load_state_dict(state)
        if self._whole is None:
            self.networks.lending.load_state_dict(state)


class Counted(Around):
    """The base's aggregator, in which every site counts alike, absent or not."""

    def __init__(self, ctx: RoundContext, base: Aggregator, method: DigestSynthesis) -> None:
        super().__init__(ctx, base)
        self.method = method

    def add(self, reply: Admitted) -> None:
        super().add(replace(reply, num_examples=1))


class StandIns(Counted):
    """Uses digests in place of absent sites' updates, and trains on all digests after aggregation."""

    def __init__(self, ctx: RoundContext, base: Aggregator, method: DigestSynthesis) -> None:
        super().__init__(ctx, base, method)
        self._networks = method.networks
        self._experiment, self._lending = self._networks.run.experiment, self._networks.lending
        self._stood_in: dict[str, float] = {}

    def while_waiting(self) -> None:
        """Add stand-ins of sites that are known to be absent."""
        super().while_waiting()
        there = {*self.ctx.request.sites, *self.ctx.request.resting}
        for site in self._list_lenders():
            if site not in there:
                self._stand_in(site)

    def add(self, reply: Admitted) -> None:
        if reply.site in self._stood_in:
            raise Rejected("the site's digests stand in for it in this round already")
        if not reply.lends_digests:
            self._lending.withdraw(reply.site, self.ctx.outcome.warnings)
        super().add(reply)

    def complete(self) -> int:
        """Add stand-ins of sites that did not answer; returns the number of answers, stand-ins included."""
        answers, outcome = super().complete(), self.ctx.outcome
        self.method.reset_after_withdrawal()
        heard = {*outcome.participants, *(site for site, _ in outcome.dropped)}
        for site in self._list_lenders():
            if site in self.ctx.request.sites and site not in heard:
                self._stand_in(site)
        for site, _ in outcome.refused:
            self._lending.ask_again(site)
        return answers + len(self._stood_in)

    def result(self) -> dict[str, Tensor]:
        arrays = self._train_jointly(super().result())
        self.ctx.outcome.details["digests"] = {
            "stood_in": {site: round(loss, 6) for site, loss in sorted(self._stood_in.items())},
            "sites": self._list_lenders(),
        }
        return arrays

    def _list_lenders(self) -> list[str]:
        """Sites of this strategy whose digests are there, in order of name."""
        members = self.ctx.members
        return [site for site in self._lending.store.sites if members is None or site in members]

    def _complete_model(self) -> dict[str, Tensor]:
        """The round's model, with the server's own layers."""
        return {**self._networks.own, **self.ctx.reference}

    def _stand_in(self, site: str) -> None:
        """The update of an absent site, from its digests."""
        request, learner = self.ctx.request, self._experiment.learner
        store, outcome = self._lending.store, self.ctx.outcome
        features, labels = self._gather_digests([site])
        result = self._networks.prepare_recall(self.ctx.reference).stand_in(
            self._complete_model(),
            features,
            labels,
            RECALL_EPOCHS,
            learner.optimizer,
            stream(self._experiment.seed, "recall-batches", site, self.ctx.number),
            request.progress,
        )
        if result is None:
            outcome.warnings.append(f"training on the digests of {site} diverged; nobody stood in for it")
            return
        update, norm, steps, loss = result
        if self.ctx.max_update_norm is not None and norm > self.ctx.max_update_norm:
            outcome.warnings.append(
                f"nobody stood in for {site}: an update of norm {norm:.4g} is above max_update_norm "
                f"{self.ctx.max_update_norm:.4g}"
            )
            return
        samples, now = min(store.samples(site), MAX_SAMPLES), self.ctx.number
        reply = Admitted(site, update, norm, samples, loss, steps, base_round=now, stand_in=True)
        try:
            super().add(reply)
        except (Rejected, OverflowError) as rejection:
            outcome.warnings.append(f"nobody stood in for {site}: {rejection}")
            return
        self._stood_in[site] = loss
        self._lending.rounds_stood_in[site] = self._lending.rounds_stood_in.get(site, 0) + 1

    def _train_jointly(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        sites, method, networks = self._list_lenders(), self.method, self._networks
        if not sites or not method.server_epochs:
            return arrays
        lr = method.server_lr or self._experiment.learner.optimizer.lr
        found = networks.prepare_recall(self.ctx.reference).train_jointly(
            {**networks.own, **arrays},
            *self._gather_digests(sites),
            method.server_epochs,
            (lr, method.guidance_lr or lr),
            stream(self._experiment.seed, "joint-batches", self.ctx.number),
            networks.velocities,
        )
        if found is None:
            networks.velocities = (None, None)
            self.ctx.outcome.warnings.append(
                "training on all digests diverged and was left out; lower server_lr, or the digests' noise"
            )
            return arrays
        trained, networks.velocities = found
        networks.own = {name: trained[name] for name in networks.own}
        return {name: trained[name] for name in arrays}

    def _gather_digests(self, sites: list[str]) -> tuple[Tensor, Tensor]:
        """(features, labels) of digests to train on."""
        spread_by = spread_factor(self._lending.digests) if self.method.spread else 1.0
        classes, device = self.ctx.request.stamp.num_classes, self._networks.run.device
        features, labels = self._lending.store.gathered(sites, classes, spread_by)
        return features.to(device), labels.to(device)
