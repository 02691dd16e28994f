"""Trains on digests at the server: stand-ins for absent sites, and the joint step with the guidance.

Symbols: D digests, M classes, P floats of the model. Hsu et al. 2022 (arXiv 2210.00737), equations 1 and 2.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from perennial.config.learner import Optimizer
from perennial.learning.optimizers import FlatOptimizer
from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from perennial.models.flat import FlatParameters
from perennial.models.layers import append_rows
from perennial.strategies.digest_synthesis.lending import DigestLending
from perennial.strategies.round.context import RunContext
from perennial.strategies.round.request import Arrays, add_prefix, extract_prefixed

SERVER_MOMENTUM = 0.9
Velocities = tuple[Tensor | None, Tensor | None]
"""Of the model and of the producer."""


@dataclass
class Recall:
    """The networks that the server trains on digests.

    They stay in evaluation mode: guidance must not move the statistics of real inputs, and nothing is dropped
    at random.

    model: a copy of its own. constants: (mean, std) of inputs, by which guidance of images is normalised as
    images are; None leaves it as it is. pull: FedProx's mu, 0 without it. own: tensors that do not travel.
    """

    model: DigestTwoBranchModel
    guidance: GuidanceProducer
    constants: tuple[Tensor, Tensor] | None
    batch_size: int
    pull: float = 0.0
    own: Collection[str] = ()
    flat: FlatParameters = field(init=False)
    producer: FlatParameters = field(init=False)

    def __post_init__(self) -> None:
        self.model.eval()
        self.flat, self.producer = FlatParameters(self.model), FlatParameters(self.guidance)

    def inputs(self, features: Tensor) -> Tensor:
        """(D, *input_shape) guidance of digests, normalised as the model's inputs are."""
        produced = self.guidance(features)
        if self.constants is None or produced.dim() != 4:
            return produced
        mean, std = self.constants
        return (produced - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    def stand_in(
        self,
        reference: Arrays,
        features: Tensor,
        labels: Tensor,
        epochs: int,
        config: Optimizer,
        generator: np.random.Generator,
        progress: float = 0.0,
    ) -> tuple[dict[str, Tensor], float, int, float] | None:
        """Train the model on an absent site's digests: (update, its L2 norm, steps, loss).

        The guidance is fixed. reference: the model that the round started from. config, progress: of the
        sites' optimiser. Own tensors are trained too and are no part of the update. Without epochs it is
        zero; None when training diverged.
        """
        self.flat.load(reference)
        before = self.flat.vector.clone()
        descent = FlatOptimizer(config, self.flat.trainable, self.flat.gradient, progress)
        with torch.no_grad():
            inputs = self.inputs(features)
        steps, total = 0, 0.0
        for _ in range(epochs):
            total = 0.0
            for rows in self._batches(len(features), generator, features.device):
                loss = F.cross_entropy(self.model.forward_digest(inputs[rows], features[rows]), labels[rows])
                loss.backward()
                if self.pull:
                    anchor = before[: len(self.flat.trainable)]
                    self.flat.gradient.add_(self.flat.trainable - anchor, alpha=self.pull)
                descent.step()
                self.flat.gradient.zero_()
                steps, total = steps + 1, total + float(loss.detach()) * len(rows)
        update = self.flat.vector - before
        if not bool(torch.isfinite(update).all()):
            return None
        views = self.flat.view_tensors(update)
        for name in self.own:
            views.pop(name).zero_()
        norm = float(torch.linalg.vector_norm(update))
        return views, norm, steps, total / len(features)

    def train_jointly(
        self,
        aggregate: Arrays,
        features: Tensor,
        labels: Tensor,
        epochs: int,
        rates: tuple[float, float],
        generator: np.random.Generator,
        velocities: Velocities = (None, None),
    ) -> tuple[dict[str, Tensor], Velocities] | None:
        """Train the aggregate and the guidance producer on all digests: (new model, new velocities).

        rates: of the model and of the producer. None when training diverged; the producer is then as it was.
        """
        self.flat.load(aggregate)
        producer = self.producer.vector.clone()
        networks = self.flat, self.producer
        descents: list[FlatOptimizer] = []
        for flat, lr, velocity in zip(networks, rates, velocities, strict=True):
            config = Optimizer(lr=lr, momentum=SERVER_MOMENTUM)
            descents.append(FlatOptimizer(config, flat.trainable, flat.gradient))
            if velocity is not None:
                descents[-1].move(flat.trainable, flat.gradient, [velocity])
        for _ in range(epochs):
            for rows in self._batches(len(features), generator, features.device):
                logits = self.model.forward_digest(self.inputs(features[rows]), features[rows])
                F.cross_entropy(logits, labels[rows]).backward()
                for descent, flat in zip(descents, networks, strict=True):
                    descent.step()
                    flat.gradient.zero_()
        if not bool(torch.isfinite(self.flat.vector).all() and torch.isfinite(self.producer.vector).all()):
            self.producer.vector.copy_(producer)
            return None
        trained = {name: tensor.clone() for name, tensor in self.flat.view_tensors(self.flat.vector).items()}
        model, guidance = (next(iter(descent.states), None) for descent in descents)
        return trained, (model, guidance)

    def _batches(
        self, count: int, generator: np.random.Generator, device: torch.device
    ) -> tuple[Tensor, ...]:
        return torch.from_numpy(generator.permutation(count)).to(device).split(self.batch_size)


class ServerNetworks:
    """The guidance producer, velocities, and the server's own copy of layers that stay at the sites.

    lending: the digests; a group of sites shares it with the strategy of all sites.
    """

    def __init__(self, run: RunContext, lending: DigestLending) -> None:
        self.run, self.lending = run, lending
        self.own: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Reset everything that was trained on digests."""
        producer = GuidanceProducer(self.run.input_shape, self.run.experiment.seed)
        self.guidance = producer.to(self.run.device)
        self.velocities: tuple[Tensor | None, Tensor | None] = (None, None)
        self._recall: Recall | None = None
        self.seen_withdrawals = self.lending.withdrawals

    def reset_after_withdrawal(self) -> None:
        """Reset guidance and velocities if a site has withdrawn digests since the last reset.

        The model keeps what it has learnt; only a run without the site is free of it.
        """
        if self.lending.withdrawals != self.seen_withdrawals:
            self.begin()

    def grow(self) -> None:
        """Reset the model's velocity, whose shape changes as the model grows."""
        self._recall = None
        self.velocities = (None, self.velocities[1])

    def inherit(self, source: "ServerNetworks", own: Arrays, *, as_former: bool) -> None:
        """Copy another's guidance, and if it served this group before (as_former), its own layers too.

        Nothing that was trained on withdrawn digests is copied. own: first values of the server's own layers,
        and of their rows of new classes.
        """
        source.reset_after_withdrawal()
        self.lending, self.own = source.lending, dict(own)
        self.guidance.load_state_dict(source.guidance.state_dict())
        self.seen_withdrawals = source.seen_withdrawals
        if as_former:
            self.own = {name: append_rows(source.own[name], tensor) for name, tensor in own.items()}
            self.velocities = (None, source.velocities[1])

    def prepare_recall(self, reference: Arrays) -> Recall:
        """The networks that train on digests, with the model in `reference` at the first call of a task."""
        if self._recall is None:
            model = copy.deepcopy(self.run.load({**self.own, **reference}))
            assert isinstance(model, DigestTwoBranchModel)
            learner = self.run.experiment.learner
            self._recall = Recall(
                model,
                self.guidance,
                self.run.constants,
                learner.batch_size,
                learner.correction.mu if learner.correction is not None else 0.0,
                self.own.keys(),
            )
        return self._recall

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed server needs, without the digests."""
        state = add_prefix("guidance", self.guidance.state_dict()) | add_prefix("own", self.own)
        for name, velocity in zip(("model", "producer"), self.velocities, strict=True):
            if velocity is not None:
                state[f"velocity/{name}"] = velocity
        return state | {"withdrawals": self.seen_withdrawals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guidance.load_state_dict(extract_prefixed("guidance", state))
        self.own = extract_prefixed("own", state)
        kept = {
            name: velocity.to(self.run.device)
            for name, velocity in extract_prefixed("velocity", state).items()
        }
        self.velocities = kept.get("model"), kept.get("producer")
        self.seen_withdrawals = state["withdrawals"]
