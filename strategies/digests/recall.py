"""Training on digests at the server: the recall of an absent site, and the joint step with the guidance.

Symbols: D digests, M classes, P floats of the model. Hsu et al. 2022 (arXiv 2210.00737), equations 1 and 2.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.sgd import sgd

from perennial.config.learner import LearnerConfig
from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
from perennial.models.flat import FlatParameters
from perennial.strategies.round.request import Arrays


class Momentum:
    """Stochastic gradient descent over one flat vector; its velocity can be kept.

    The functional form of PyTorch's rule, because building its class imports a compiler.
    """

    def __init__(
        self, lr: float, momentum: float, velocity: Tensor | None = None, weight_decay: float = 0.0
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._velocity: list[Tensor | None] = [velocity]

    @property
    def velocity(self) -> Tensor | None:
        return self._velocity[0]

    @torch.no_grad()
    def step(self, flat: FlatParameters) -> None:
        """Apply the gradient and clear it."""
        sgd(
            [flat.trainable],
            [flat.gradient],
            self._velocity,
            foreach=False,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        flat.gradient.zero_()


def epochs_of_a_site(samples: int, digests: int, learner: LearnerConfig) -> int:
    """Epochs over digests that take as many steps as a site's over the samples in them; 1 or more."""
    steps, here = (math.ceil(count / learner.batch_size) for count in (samples, digests))
    return max(1, round(learner.epochs * steps / here))


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
        """(D, *input_shape) guidance of digests, as the model sees an input."""
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
        descent: Momentum,
        generator: np.random.Generator,
    ) -> tuple[dict[str, Tensor], float, int, float] | None:
        """(update, its L2 norm, steps, loss) of an absent site: the model trained on its digests.

        The guidance is fixed. reference: the model that the round started from. Own tensors are trained along
        and are no part of the update. Without epochs it is zero; None when training diverged.
        """
        self.flat.load(reference)
        before = self.flat.vector.clone()
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
                descent.step(self.flat)
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
        descents: tuple[Momentum, Momentum],
        generator: np.random.Generator,
    ) -> dict[str, Tensor] | None:
        """The aggregate trained further on all digests, together with the guidance producer.

        descents: of the model and of the producer; they keep their velocity from round to round. None when
        training diverged; the producer is then as it was.
        """
        self.flat.load(aggregate)
        producer = self.producer.vector.clone()
        for _ in range(epochs):
            for rows in self._batches(len(features), generator, features.device):
                logits = self.model.forward_digest(self.inputs(features[rows]), features[rows])
                F.cross_entropy(logits, labels[rows]).backward()
                for descent, flat in zip(descents, (self.flat, self.producer), strict=True):
                    descent.step(flat)
        if not bool(torch.isfinite(self.flat.vector).all() and torch.isfinite(self.producer.vector).all()):
            self.producer.vector.copy_(producer)
            return None
        return {name: tensor.clone() for name, tensor in self.flat.views(self.flat.vector).items()}

    @torch.no_grad()
    def loss(self, arrays: Arrays, features: Tensor, labels: Tensor) -> float:
        """Mean cross entropy on digests, of a model and of the guidance as it is now."""
        self.flat.load(arrays)
        answers = self.model.forward_digest(self.inputs(features), features)
        return float(F.cross_entropy(answers, labels))

    def _batches(
        self, count: int, generator: np.random.Generator, device: torch.device
    ) -> tuple[Tensor, ...]:
        return torch.from_numpy(generator.permutation(count)).to(device).split(self.batch_size)
