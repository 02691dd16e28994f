"""Trains on digests at the server: stand-ins for absent sites, and the joint step with the guidance.

Symbols: D digests, M classes, P floats of the model. Hsu et al. 2022 (arXiv 2210.00737), equations 1 and 2.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from perennial.config.learner import Optimizer
from perennial.learning.optimizers import FlatOptimizer
from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from perennial.models.flat import FlatParameters
from perennial.strategies.round.request import Arrays

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
        self.flat.hold(self.own)

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
        self.flat.clear_held(update)
        norm = float(torch.linalg.vector_norm(update))
        shared = {name: tensor for name, tensor in self.flat.views(update).items() if name not in self.own}
        return shared, norm, steps, total / len(features)

    def joint_step(
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
        trained = {name: tensor.clone() for name, tensor in self.flat.views(self.flat.vector).items()}
        model, guidance = (next(iter(descent.states), None) for descent in descents)
        return trained, (model, guidance)

    def _batches(
        self, count: int, generator: np.random.Generator, device: torch.device
    ) -> tuple[Tensor, ...]:
        return torch.from_numpy(generator.permutation(count)).to(device).split(self.batch_size)
