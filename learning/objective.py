"""The sum of a training set's loss terms: averaged by ordinary training, sample by sample for DP-SGD."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.foundation.errors import PrivacyError
from perennial.learning.batches import TrainingSet
from perennial.learning.classification import Batch, batch_mean, classification
from perennial.learning.frozen_outputs import FrozenOutputs
from perennial.learning.losses import distillation, relation_distillation, supervised_contrastive
from perennial.models.incremental import IncrementalModel
from perennial.privacy.combinations import coupled_reason

Extra = Callable[[], Tensor]
"""A term of each step's loss that has samples of its own, such as inputs that came with the request."""


@dataclass(frozen=True)
class Term:
    """One term of the objective.

    values: (B,) or (B, M) of the samples of a batch, or one number for all of them.
    factors: what multiplies their mean, one after the other.
    """

    values: Tensor
    factors: tuple[float, ...] = ()

    def mean(self) -> Tensor:
        """The term of the batch."""
        value = batch_mean(self.values) if self.values.dim() else self.values
        for factor in self.factors:
            value = factor * value
        return value

    def each(self) -> Tensor:
        """(B,) values of the samples."""
        values = self.values if self.values.dim() == 1 else self.values.flatten(1).mean(dim=1)
        return math.prod(self.factors) * values if self.factors else values


class Objective:
    """The sum of the loss terms for one training set.

    teacher: frozen model of the task before, or None in task 1 and where no term needs it.
    first_class: of the task, which some losses need. extra: one more term, with samples of its own.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: IncrementalModel,
        data: TrainingSet,
        teacher: IncrementalModel | None,
        augmented: bool,
        first_class: int = 0,
        extra: Extra | None = None,
    ) -> None:
        self._config, self._model, self._first_class, self._extra = config, model, first_class, extra
        counts = data.counts(model.num_classes)
        if config.memory is not None and config.memory.balanced:
            # the prior of what is drawn: corrected twice, common classes would count less than rare ones
            counts = counts.clamp(max=1)
        self._loss = classification(config)
        self._loss.begin(counts)
        kind = "full" if config.distillation is None else config.distillation.teacher
        self._frozen = FrozenOutputs(model, teacher, kind, data, augmented)
        self.classification = torch.zeros((), device=data.y.device)
        """The loss over the labels of the latest batch, without gradient."""

    def __call__(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss of one batch."""
        batch = self._batch(rows, inputs, labels)
        loss = self._loss.mean(batch)
        self.classification = loss.detach()
        for term in self._terms(batch):
            loss = loss + term.mean()
        return loss if self._extra is None else loss + self._extra()

    def require_alone(self) -> None:
        """Raises PrivacyError naming each term in which a sample's loss depends on other samples."""
        terms = coupled_terms(self._config)
        if self._extra is not None:
            terms.append("the strategy's own term of the loss")
        if terms:
            raise PrivacyError(coupled_reason(terms))

    def each(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """(B,) losses of the samples of a batch, for an objective that has passed require_alone."""
        batch = self._batch(rows, inputs, labels)
        loss = Term(self._loss(batch)).each()
        for term in self._terms(batch):
            loss = loss + term.each()
        return loss

    def _batch(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Batch:
        features, old_logits = self._frozen.features_and_old_logits(rows, inputs)
        return Batch(self._model.classify(features), labels, features, old_logits, self._first_class)

    def _terms(self, batch: Batch) -> list[Term]:
        """The terms beside the loss over the labels."""
        distil, contrast = self._config.distillation, self._config.contrastive
        terms: list[Term] = []
        if distil is not None and batch.old_logits is not None:
            if distil.form == "all_classes":
                values = relation_distillation(
                    batch.logits, batch.labels, batch.old_logits, distil.temperature
                )
            else:
                values = distillation(batch.logits, batch.old_logits, distil.temperature)
            terms.append(Term(values, (distil.temperature**2, distil.weight)))
        if contrast is not None:
            value = supervised_contrastive(batch.features, batch.labels, contrast.temperature, contrast.form)
            terms.append(Term(value, (contrast.weight,)))
        return terms


def coupled_terms(config: LearnerConfig) -> list[str]:
    """Names of the terms in which a sample's loss depends on other samples; DP-SGD can have none of them."""
    found = {
        f"learner.classification {config.classification.name!r}": not classification(config).alone,
        "learner.contrastive": config.contrastive is not None,
    }
    return [name for name, coupled in found.items() if coupled]
