"""Outputs of the frozen networks for a batch: features of the old backbone, and logits of the teacher.

Shapes: B batch size, d features, n samples, M_old classes of the teacher.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from perennial.foundation.errors import ProtocolError
from perennial.learning.batches import TrainingSet, in_batches
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.incremental import IncrementalModel


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
            self.old_features = outputs(self._dual.old_features, data)
        if teacher is not None:
            self.old_logits = outputs(teacher, data)

    def beside(self, rows: Tensor, inputs: Tensor) -> Outputs:
        """Outputs of the model and the frozen networks for one batch. rows: indices of its samples."""
        old = self._old_of(rows, inputs)
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
        return teacher_logits(self._teacher, inputs, old)

    def _old_of(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        if self._dual is None:
            return None
        return self._dual.old_features(inputs) if self.old_features is None else self.old_features[rows]


@torch.no_grad()
def teacher_logits(teacher: IncrementalModel, inputs: Tensor, old: Tensor | None) -> Tensor:
    """(B, M_old) logits of the teacher for a batch.

    old: (B, d) features of the model's old backbone, which was the teacher's new one; None without one.
    """
    if old is None:
        return teacher(inputs)
    assert isinstance(teacher, DualBackboneModel)
    return teacher.classify(teacher.features_beside(inputs, old))


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


@torch.no_grad()
def outputs(answer: Callable[[Tensor], Tensor], data: TrainingSet) -> Tensor:
    """(n, ...) values of `answer`, a function of inputs (B, ...), for all samples, without gradient."""
    return torch.cat([answer(data.inputs(rows)) for rows in in_batches(data)])
