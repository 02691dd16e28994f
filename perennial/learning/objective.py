"""The sum of a training set's loss terms: averaged by ordinary training, sample by sample for DP-SGD."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.foundation.errors import PrivacyError, ProtocolError
from perennial.learning.batches import TrainingSet, compute_outputs
from perennial.learning.losses import (
    Batch,
    average_batch,
    build_classification,
    compute_contrastive,
    compute_distillation,
    compute_feature_distillation,
    compute_relation_distillation,
)
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.incremental import IncrementalModel
from perennial.models.layers import explain_stale_tensors
from perennial.privacy.combinations import explain_coupled


class Outputs(NamedTuple):
    """Outputs of the model and the frozen networks for a batch.

    features: (B, d) of the model. old_logits: (B, M_old) of the teacher, or None. new_features: (B, d) of the
    new backbone alone, if the model has an old one beside it.
    """

    features: Tensor
    old_logits: Tensor | None = None
    new_features: Tensor | None = None


class FrozenOutputs:
    """The old backbone and the teacher on one training set.

    Without augmentation they see the same inputs in every epoch, so each answers once and is remembered:
    old_features (n, d) and old_logits (n, M_old), or None.
    """

    def __init__(
        self,
        model: IncrementalModel,
        teacher: IncrementalModel | None,
        data: TrainingSet,
        augmented: bool,
    ) -> None:
        """Check the frozen networks and, without augmentation, compute their outputs for the whole set.

        teacher: complete model of the previous task, or None. augmented: whether inputs differ by epoch.

        Raises ProtocolError when a frozen part could still learn, or knows as many classes as the model.
        """
        self._model = model
        self._dual = (
            model if isinstance(model, DualBackboneModel) and model.old_backbone is not None else None
        )
        self._teacher = teacher
        check_frozen(model, teacher)
        self.old_features = self.old_logits = None
        if augmented:
            return
        if self._dual is not None:
            self.old_features = compute_outputs(self._dual.compute_old_features, data)
        if teacher is not None:
            self.old_logits = compute_outputs(teacher, data)

    def answer_batch(self, rows: Tensor, inputs: Tensor) -> Outputs:
        """Outputs of the model and the frozen networks for one batch. rows: indices of its samples."""
        old = self._find_old_features(rows, inputs)
        if self._dual is None or old is None:
            features, new = self._model.features(inputs), None
        else:
            new = self._dual.backbone(inputs)
            features = self._dual.fuse(old, new)
        return Outputs(features, self._old_logits_of(rows, inputs, old), new)

    def _old_logits_of(self, rows: Tensor, inputs: Tensor, old: Tensor | None) -> Tensor | None:
        if self._teacher is None:
            return None
        if self.old_logits is not None:
            return self.old_logits[rows]
        return compute_teacher_logits(self._teacher, inputs, old)

    def _find_old_features(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        if self._dual is None:
            return None
        return (
            self._dual.compute_old_features(inputs) if self.old_features is None else self.old_features[rows]
        )


@torch.no_grad()
def compute_teacher_logits(teacher: IncrementalModel, inputs: Tensor, old: Tensor | None) -> Tensor:
    """(B, M_old) logits of the teacher for a batch.

    old: (B, d) features of the model's old backbone, which was the teacher's new one; None without one.
    """
    if old is None:
        return teacher(inputs)
    assert isinstance(teacher, DualBackboneModel)
    return teacher.classify(teacher.complete_features(inputs, old))


def check_frozen(model: IncrementalModel, teacher: IncrementalModel | None) -> None:
    """Raise ProtocolError if a frozen part could still be trained, or the teacher knows no fewer classes."""
    frozen = {"teacher": teacher}
    if isinstance(model, DualBackboneModel):
        frozen["old backbone"] = model.old_backbone  # pyright: ignore[reportArgumentType]
    for name, module in frozen.items():
        if module is not None and any(parameter.requires_grad for parameter in module.parameters()):
            raise ProtocolError(f"{name}: found parameters that would be trained, allowed frozen ones only")
    if teacher is not None and teacher.num_classes >= model.num_classes:
        raise ProtocolError(
            f"teacher: found a head of {teacher.num_classes} classes, allowed fewer than the "
            f"{model.num_classes} of this task"
        )


@dataclass(frozen=True)
class Term:
    """One term of the objective.

    values: (B,) or (B, M) of the samples of a batch, or one number for all of them.
    factors: what multiplies their mean, one after the other.
    """

    values: Tensor
    factors: tuple[float, ...] = ()

    def mean(self) -> Tensor:
        """The term's value for the batch: the mean of its values times the factors."""
        value = average_batch(self.values) if self.values.dim() else self.values
        for factor in self.factors:
            value = factor * value
        return value

    def each(self) -> Tensor:
        """(B,) the term's value for each sample."""
        values = self.values if self.values.dim() == 1 else self.values.flatten(1).mean(dim=1)
        return math.prod(self.factors) * values if self.factors else values


class Extra(Protocol):
    """A term of each step's loss that has samples of its own, such as inputs that came with the request."""

    def draw(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the next step; (S, ...) each."""
        ...

    def term(self, logits: Tensor, targets: Tensor) -> Term:
        """The term for the model's logits (S, M) on the inputs."""
        ...


class Objective:
    """The sum of the loss terms for one training set.

    teacher: frozen model of the task before, or None in task 1 and where no term needs it. augmented: whether
    inputs change between epochs. first_class: of the task. extra: one more term, with samples of its own.
    terms: further ones over each batch, each a scalar or None.
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
        terms: Sequence[Callable[[Batch], Tensor | None]] = (),
    ) -> None:
        self._terms = terms
        self._config, self._model, self._first_class, self._extra = config, model, first_class, extra
        self._shapes = {"head.bias": torch.Size((model.num_classes,))}
        self._loss = build_classification(config)
        self._loss.begin(count_class_samples(config, data, model.num_classes))
        self._frozen = FrozenOutputs(model, teacher, data, augmented)
        self.classification = torch.zeros((), device=data.y.device)
        """The loss over the labels of the latest batch, without gradient."""

    def __call__(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss of one batch."""
        batch = self._build_batch(rows, inputs, labels)
        with explain_stale_tensors((self._loss,), self._shapes):
            loss = self._loss.mean(batch)
        self.classification = loss.detach()
        for term in compute_terms_beside(self._config, batch):
            loss = loss + term.mean()
        for further in self._terms:
            if (value := further(batch)) is not None:
                loss = loss + value
        if self._extra is None:
            return loss
        drawn, targets = self._extra.draw()
        return loss + self._extra.term(self._model(drawn), targets).mean()

    def require_alone(self) -> None:
        """Raise PrivacyError that names each term in which a sample's loss depends on other samples."""
        terms = list_coupled_terms(self._config)
        if self._extra is not None or self._terms:
            terms.append("the strategy's own term of the loss")
        if terms:
            raise PrivacyError(explain_coupled(terms))

    def each(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """(B,) losses of the samples of a batch, for an objective that has passed require_alone."""
        batch = self._build_batch(rows, inputs, labels)
        with explain_stale_tensors((self._loss,), self._shapes):
            loss = Term(self._loss(batch)).each()
        for term in compute_terms_beside(self._config, batch):
            loss = loss + term.each()
        return loss

    def _build_batch(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Batch:
        found = self._frozen.answer_batch(rows, inputs)
        return Batch(
            self._model.classify(found.features),
            labels,
            found.features,
            found.old_logits,
            self._first_class,
            found.new_features,
        )


def compute_terms_beside(config: LearnerConfig, batch: Batch) -> list[Term]:
    """All terms of a batch's loss but that over the labels: distillation, consolidation and contrastive."""
    terms = compute_row_terms(config, batch)
    if (contrast := config.contrastive) is not None:
        value = compute_contrastive(batch.features, batch.labels, contrast.temperature, contrast.form)
        terms.append(Term(value, (contrast.weight,)))
    return terms


def compute_row_terms(config: LearnerConfig, batch: Batch) -> list[Term]:
    """The distillation and consolidation terms of a batch, in which each sample has a value of its own."""
    terms: list[Term] = []
    distil = config.distillation
    if distil is not None and batch.old_logits is not None:
        if distil.form == "all_classes":
            values = compute_relation_distillation(
                batch.logits, batch.labels, batch.old_logits, distil.temperature
            )
        else:
            values = compute_distillation(batch.logits, batch.old_logits, distil.temperature)
        terms.append(Term(values, (distil.temperature**2, distil.weight)))
    if config.consolidation is not None and batch.new_features is not None:
        values = compute_feature_distillation(batch.new_features, batch.features)
        terms.append(Term(values, (config.consolidation.weight,)))
    return terms


def count_class_samples(config: LearnerConfig, data: TrainingSet, num_classes: int) -> Tensor:
    """(num_classes,) samples of each class for the loss's prior; 0 or 1 under class-balanced batches."""
    counts = data.counts(num_classes)
    # the prior of what is drawn: corrected twice, common classes would count less than rare ones
    return counts.clamp(max=1) if config.memory is not None and config.memory.balanced else counts


def list_coupled_terms(config: LearnerConfig) -> list[str]:
    """Names of the terms in which a sample's loss depends on other samples; DP-SGD can have none of them."""
    found = {
        f"learner.classification {config.classification.name!r}": not build_classification(config).alone,
        "learner.contrastive": config.contrastive is not None,
    }
    return [name for name, coupled in found.items() if coupled]
