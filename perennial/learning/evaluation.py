"""Counts a model's right answers for each class, by its head or by another classifier of its features."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.foundation.cache import BoundedFolder
from perennial.learning.batches import TrainingSet, in_batches
from perennial.learning.scored import classifier
from perennial.models.class_means import mean_similarity
from perennial.models.incremental import IncrementalModel


@torch.no_grad()
def count_correct(
    predict: Callable[[Tensor], Tensor], data: TrainingSet, num_classes: int, among: Tensor | None = None
) -> tuple[list[int], list[int]]:
    """(correct, total) for each class; both have num_classes entries, all 0 for empty data.

    predict: maps inputs (B, ...) to classes (B,). among: (m,) int64, the samples to count; None: all.
    """
    correct = torch.zeros(num_classes, dtype=torch.int64, device=data.y.device)
    total = torch.zeros_like(correct)
    for rows in in_batches(data, among):
        labels = data.y[rows]
        hits = predict(data.inputs(rows)) == labels
        correct += torch.bincount(labels[hits], minlength=num_classes)
        total += torch.bincount(labels, minlength=num_classes)
    return correct.tolist(), total.tolist()


def by_head(model: IncrementalModel) -> Callable[[Tensor], Tensor]:
    """A function from inputs (B, ...) to the class (B,) of the largest logit."""
    return lambda inputs: model(inputs).argmax(dim=1)


def head_counts(
    model: IncrementalModel,
    data: TrainingSet,
    num_classes: int,
    folder: BoundedFolder | None,
    among: Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """(correct, total) of the model's head, as count_correct returns them.

    folder: where features of fixed maps, computed once for each sample, may be stored; None: in memory.
    """
    classify, rows = classifier(model, data, None, folder)
    return count_correct(lambda inputs: classify(inputs).argmax(dim=1), rows, num_classes, among)


def by_class_means(model: IncrementalModel, means: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from inputs (B, ...) to the class (B,) whose mean feature is closest.

    means: (M, d), rows of unit length, or of zeros for classes that are never predicted.
    """
    means = means.to(model.head.weight.device)
    return lambda inputs: mean_similarity(model.features(inputs), means).argmax(dim=1)


@torch.no_grad()
def unit_features(model: IncrementalModel, data: TrainingSet) -> Tensor:
    """(n, d) features of unit length, in evaluation mode and without augmentation."""
    model.eval()
    return torch.cat([F.normalize(model.features(data.inputs(rows)), dim=1) for rows in in_batches(data)])
