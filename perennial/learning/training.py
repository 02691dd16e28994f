"""Local training: one site's turn in one round, built from the parts that the experiment names.

Symbols: n samples, M classes seen so far, P floats of the model, B batch size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import ConfigError, DataError
from perennial.foundation.streams import torch_seed
from perennial.learning.batches import TrainingSet, shuffle_batches
from perennial.learning.device import use_precision
from perennial.learning.objective import Extra, Objective
from perennial.learning.optimizers import FlatOptimizer
from perennial.learning.site_method import GradientCorrection, OptionalTerm
from perennial.learning.steps import AS_THEY_COME, DRAWS_ANEW, Steps
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel


@dataclass(frozen=True)
class TrainingResult:
    """The update and the losses of local training.

    update: (P,) float32, vector after minus vector before.
    loss: mean of the last epoch. steps: of the optimiser.
    classification: the part of the loss that is over the labels, if known.
    """

    update: Tensor
    loss: float
    steps: int
    classification: float | None = None

    def require_finite_loss(self) -> float:
        """The loss. Raises ConfigError where training diverged, which no repetition of the round mends."""
        if not math.isfinite(self.loss):
            raise ConfigError(f"training diverged: its loss is {self.loss}; lower learner.optimizer.lr")
        return self.loss


def train(
    config: LearnerConfig,
    model: IncrementalModel,
    flat: FlatParameters,
    data: TrainingSet,
    generator: np.random.Generator,
    *,
    teacher: IncrementalModel | None = None,
    augmentation: AugmentationConfig,
    progress: float = 0.0,
    first_class: int = 0,
    correction: GradientCorrection | None = None,
    extra: Extra | None = None,
    terms: Sequence[OptionalTerm] = (),
    steps: Steps = AS_THEY_COME,
    start: Mapping[str, Tensor] | None = None,
) -> TrainingResult:
    """Train model in place on data for the configured epochs, and return its update and losses.

    correction: is added to each step's gradient. extra, terms: further terms of each step's loss, extra on
    inputs of its own. steps: carries them out. The device is not waited for between the first step and the
    last. start: the tensors that flat was loaded from, if the caller still holds them: then no copy of them
    is made.
    Raises DataError when there is nothing to train on, or when batch normalisation meets a single sample.
    """
    if len(data) == 0:
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    normalises_batches = find_fewest_samples(model) > 1
    if len(data) < find_fewest_samples(model):
        raise DataError("one sample only, and batch normalisation needs two; use model.norm: group")
    device = flat.vector.device
    before = flat.vector.clone() if start is None or correction is not None else None
    objective = Objective(
        config.drop_idle_terms(progress), model, data, teacher, augmentation.active, first_class, extra, terms
    )
    optimizer = FlatOptimizer(
        config.optimizer, flat.trainable, flat.gradient, progress, recorded=steps.records
    )
    model.train()
    flat.gradient.zero_()
    epoch_loss, epoch_classification = torch.zeros(2, device=device)
    seen = taken = 0
    balanced = config.memory is not None and config.memory.balanced

    def step(rows: Tensor, inputs: Tensor, labels: Tensor) -> None:
        with use_precision(config, device):
            loss = objective(rows, inputs, labels)
        loss.backward()
        if correction is not None and before is not None:
            correction.apply(flat.gradient, flat.trainable, before[: len(flat.trainable)])
        optimizer.step()
        flat.gradient.zero_()
        size = rows.shape[0]
        epoch_loss.add_(loss.detach(), alpha=size)
        epoch_classification.add_(objective.classification, alpha=size)

    own = extra is not None or terms or (correction is not None and correction.others)
    obstacle = DRAWS_ANEW if own else optimizer.obstacle
    with seed_dropout(model, generator), steps.turn(obstacle) as carry_out:
        for _ in range(config.epochs):
            epoch_loss.zero_()
            epoch_classification.zero_()
            seen = 0
            for rows, inputs, labels in shuffle_batches(
                data,
                config.batch_size,
                generator,
                augmentation,
                balanced=balanced,
                drop_single=normalises_batches,
            ):
                carry_out(step, rows, inputs, labels)
                seen += len(labels)
                taken += 1
    loss, over_labels = torch.stack([epoch_loss, epoch_classification]).tolist()
    # before the update takes as much memory
    optimizer.forget()
    if flat.large:
        flat.forget_gradient()
    if before is None:
        assert start is not None
        before = flat.flatten(start)
    return TrainingResult(torch.sub(flat.vector, before, out=before), loss / seen, taken, over_labels / seen)


def find_fewest_samples(model: nn.Module) -> int:
    """The fewest samples that train() takes: 2 where the model has batch normalisation, frozen or not."""
    return 1 + any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@contextmanager
def seed_dropout(model: nn.Module, generator: np.random.Generator) -> Iterator[None]:
    """A context in which dropout layers draw from a random stream that `generator` seeds.

    They draw from PyTorch's global generator, which is restored afterwards.
    """
    if not any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()
    ):
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed(generator))
        yield
