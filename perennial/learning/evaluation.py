"""Counts a model's right answers for each class, by its head or by another classifier of its features."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.foundation.cache import BoundedFolder
from perennial.learning.batches import TrainingSet, compute_outputs
from perennial.learning.scored import build_classifier
from perennial.models.class_means import mean_similarity
from perennial.models.incremental import IncrementalModel


@torch.no_grad()
def count_correct(
    predict: Callable[[Tensor], Tensor], data: TrainingSet, num_classes: int, among: Tensor | None = None
) -> tuple[list[int], list[int]]:
    """(correct, total) for each class; both have num_classes entries, all 0 for empty data.

    predict: maps inputs (B, ...) to classes (B,). among: (m,) int64, the samples to count; None: all.
    """
    labels = data.y if among is None else data.y[among]
    hits = compute_outputs(predict, data, among) == labels if len(labels) else labels.bool()
    correct = torch.bincount(labels[hits], minlength=num_classes)
    return correct.tolist(), torch.bincount(labels, minlength=num_classes).tolist()


def build_head_classifier(model: IncrementalModel) -> Callable[[Tensor], Tensor]:
    """A function from inputs (B, ...) to the class (B,) of the largest logit."""
    return lambda inputs: model(inputs).argmax(dim=1)


def count_head_correct(
    model: IncrementalModel,
    data: TrainingSet,
    num_classes: int,
    folder: BoundedFolder | None,
    among: Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """(correct, total) of the model's head, as count_correct returns them.

    folder: where features of fixed maps, computed once for each sample, may be stored; None: in memory.
    """
    classify, rows = build_classifier(model, data, None, folder)
    return count_correct(lambda inputs: classify(inputs).argmax(dim=1), rows, num_classes, among)


def build_mean_classifier(model: IncrementalModel, means: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from inputs (B, ...) to the class (B,) whose mean feature is closest.

    means: (M, d), rows of unit length, or of zeros for classes that are never predicted.
    """
    means = means.to(model.head.weight.device)
    return lambda inputs: mean_similarity(model.features(inputs), means).argmax(dim=1)


@torch.no_grad()
def compute_unit_features(model: IncrementalModel, data: TrainingSet) -> Tensor:
    """(n, d) features of unit length, in evaluation mode and without augmentation."""
    model.eval()
    return compute_outputs(lambda inputs: F.normalize(model.features(inputs), dim=1), data)
