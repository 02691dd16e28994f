"""Local training: one site's turn in one round, built from the parts that the experiment names.

Symbols: n samples, M classes seen so far, P floats of the model, B batch size.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client.batches import TrainingSet, shuffled
from client.gradient_correction import GradientCorrection
from client.losses import (
    balanced_softmax,
    current_softmax,
    distillation,
    icarl_bce,
    log_prior,
    supervised_contrastive,
)
from client.optimizers import FlatOptimizer
from config.learner import LearnerConfig
from data.config import AugmentationConfig
from foundation.errors import DataError
from foundation.streams import torch_seed
from models.flat import FlatParameters
from models.incremental import IncrementalModel

EVALUATION_BATCH = 2048


@dataclass(frozen=True)
class TrainingResult:
    """update: (P,) float32, vector after minus vector before. loss: mean of the last epoch."""

    update: Tensor
    loss: float
    steps: int


class Objective:
    """The sum of the loss terms for one training set.

    teacher: frozen model of the task before, or None in task 1 and where no term needs it.
    first_class: of the task; current_softmax alone needs it.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: IncrementalModel,
        data: TrainingSet,
        teacher: nn.Module | None,
        augmented: bool,
        first_class: int = 0,
    ) -> None:
        self._config = config
        self._first_class = first_class
        self._model = model
        self._prior: Tensor | None = None
        if config.classification.name == "balanced_softmax":
            counts = data.counts(model.num_classes)
            self._prior = log_prior(counts, config.classification.scale, config.classification.sign)
        self._teacher = teacher
        # without augmentation the teacher sees the same input in every epoch, so it answers once
        self._remembered = None if teacher is None or augmented else outputs(teacher, data)

    def __call__(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss of one batch."""
        config = self._config
        features = self._model.features(inputs)
        logits = self._model.classify(features)
        old_logits = self._old_logits(rows, inputs)
        match config.classification.name:
            case "balanced_softmax":
                assert self._prior is not None
                loss = balanced_softmax(logits, labels, self._prior)
            case "current_softmax":
                loss = current_softmax(logits, labels, self._first_class)
            case "icarl_bce":
                loss = icarl_bce(logits, labels, old_logits)
            case _:
                loss = F.cross_entropy(logits, labels)
        if config.distillation is not None and old_logits is not None:
            loss = loss + config.distillation.weight * distillation(
                logits, old_logits, config.distillation.temperature
            )
        if config.contrastive is not None:
            term = supervised_contrastive(
                features, labels, config.contrastive.temperature, config.contrastive.form
            )
            loss = loss + config.contrastive.weight * term
        return loss

    def _old_logits(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        if self._teacher is None:
            return None
        if self._remembered is not None:
            return self._remembered[rows]
        with torch.no_grad():
            return self._teacher(inputs)


@torch.no_grad()
def outputs(model: nn.Module, data: TrainingSet) -> Tensor:
    """(n, M) logits of a frozen model on all samples, in batches."""
    return torch.cat(
        [model(data.inputs(slice(i, i + EVALUATION_BATCH))) for i in range(0, len(data), EVALUATION_BATCH)]
    )


def train(
    config: LearnerConfig,
    model: IncrementalModel,
    flat: FlatParameters,
    data: TrainingSet,
    generator: np.random.Generator,
    *,
    teacher: nn.Module | None = None,
    augmentation: AugmentationConfig,
    progress: float = 0.0,
    first_class: int = 0,
    correction: GradientCorrection | None = None,
    rehearsal: Callable[[], Tensor] | None = None,
) -> TrainingResult:
    """Train model in place on data for the configured epochs, and say what changed.

    correction: what is added to each step's gradient. rehearsal: one more term of each step's loss.
    Raises DataError when there is nothing to train on, or when batch normalisation meets a single sample.
    """
    if len(data) == 0:
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    normalises_batches = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    if normalises_batches and len(data) == 1:
        raise DataError("one sample only, and batch normalisation needs two; use model.norm: group")
    before = flat.vector.clone()
    objective = Objective(config, model, data, teacher, augmentation.active, first_class)
    optimizer = FlatOptimizer(config.optimizer, flat.trainable, flat.gradient, progress)
    anchor = before[: len(flat.trainable)]
    model.train()
    flat.gradient.zero_()
    epoch_loss, seen, steps = torch.zeros((), device=before.device), 0, 0
    balanced = config.memory is not None and config.memory.balanced
    with seeded_dropout(model, generator):
        for _ in range(config.epochs):
            epoch_loss.zero_()
            seen = 0
            for rows, inputs, labels in shuffled(
                data,
                config.batch_size,
                generator,
                augmentation,
                balanced=balanced,
                drop_single=normalises_batches,
            ):
                with _autocast(config, before.device):
                    loss = objective(rows, inputs, labels)
                    if rehearsal is not None:
                        loss = loss + rehearsal()
                loss.backward()
                if correction is not None:
                    correction.apply(flat.gradient, flat.trainable, anchor)
                optimizer.step()
                flat.keep_frozen_rows(before)
                flat.keep_held(before)
                flat.gradient.zero_()
                size = rows.shape[0]
                epoch_loss.add_(loss.detach(), alpha=size)
                seen += size
                steps += 1
    return TrainingResult(flat.vector - before, float(epoch_loss) / seen, steps)


@contextmanager
def seeded_dropout(model: nn.Module, generator: np.random.Generator) -> Iterator[None]:
    """Dropout layers draw from PyTorch's global generator; here they get a stream of their own, and leave it
    as it was."""
    if not any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()
    ):
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed(generator))
        yield


def _autocast(config: LearnerConfig, device: torch.device) -> AbstractContextManager[object]:
    if config.precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
