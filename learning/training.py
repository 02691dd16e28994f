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

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import DataError
from perennial.foundation.streams import torch_seed
from perennial.learning.batches import TrainingSet, shuffled
from perennial.learning.frozen_outputs import FrozenOutputs
from perennial.learning.gradient_correction import GradientCorrection
from perennial.learning.losses import (
    balanced_softmax,
    current_softmax,
    distillation,
    gradient_compensation,
    icarl_bce,
    log_prior,
    relation_distillation,
    supervised_contrastive,
)
from perennial.learning.optimizers import FlatOptimizer
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel


@dataclass(frozen=True)
class TrainingResult:
    """update: (P,) float32, vector after minus vector before.

    loss: mean of the last epoch. classification: the part of it that is the loss over the labels, if known.
    """

    update: Tensor
    loss: float
    steps: int
    classification: float | None = None


class Objective:
    """The sum of the loss terms for one training set.

    teacher: frozen model of the task before, or None in task 1 and where no term needs it.
    first_class: of the task, which some losses need.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: IncrementalModel,
        data: TrainingSet,
        teacher: IncrementalModel | None,
        augmented: bool,
        first_class: int = 0,
    ) -> None:
        self._config = config
        self._first_class = first_class
        self._model = model
        self._prior: Tensor | None = None
        if config.classification.name == "balanced_softmax":
            counts = data.counts(model.num_classes)
            if config.memory is not None and config.memory.balanced:
                # the prior of what is drawn: corrected twice, common classes would count less than rare ones
                counts = counts.clamp(max=1)
            self._prior = log_prior(counts, config.classification.scale, config.classification.sign)
        kind = "full" if config.distillation is None else config.distillation.teacher
        self._frozen = FrozenOutputs(model, teacher, kind, data, augmented)
        self.classification = torch.zeros((), device=data.y.device)
        """The loss over the labels of the latest batch, without gradient."""

    def __call__(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss of one batch."""
        config = self._config
        features, old_logits = self._frozen.features_and_old_logits(rows, inputs)
        logits = self._model.classify(features)
        match config.classification.name:
            case "balanced_softmax":
                assert self._prior is not None
                loss = balanced_softmax(logits, labels, self._prior)
            case "current_softmax":
                loss = current_softmax(logits, labels, self._first_class)
            case "icarl_bce":
                loss = icarl_bce(logits, labels, old_logits)
            case "gradient_compensation":
                loss = gradient_compensation(logits, labels, self._first_class)
            case _:
                loss = F.cross_entropy(logits, labels)
        self.classification = loss.detach()
        if config.distillation is not None and old_logits is not None:
            temperature = config.distillation.temperature
            if config.distillation.form == "all_classes":
                term = relation_distillation(logits, labels, old_logits, temperature)
            else:
                term = distillation(logits, old_logits, temperature)
            loss = loss + config.distillation.weight * term
        if config.contrastive is not None:
            term = supervised_contrastive(
                features, labels, config.contrastive.temperature, config.contrastive.form
            )
            loss = loss + config.contrastive.weight * term
        return loss


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
    epoch_loss, epoch_classification = torch.zeros(2, device=before.device)
    seen = steps = 0
    balanced = config.memory is not None and config.memory.balanced
    with seeded_dropout(model, generator):
        for _ in range(config.epochs):
            epoch_loss.zero_()
            epoch_classification.zero_()
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
                epoch_classification.add_(objective.classification, alpha=size)
                seen += size
                steps += 1
    return TrainingResult(
        flat.vector - before, float(epoch_loss) / seen, steps, float(epoch_classification) / seen
    )


@contextmanager
def seeded_dropout(model: nn.Module, generator: np.random.Generator) -> Iterator[None]:
    """Give dropout layers a random stream of their own while training lasts.

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


def _autocast(config: LearnerConfig, device: torch.device) -> AbstractContextManager[object]:
    if config.precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
