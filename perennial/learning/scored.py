"""Classifies samples and bins the scores as the tables of an evaluation count them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perennial.foundation.cache import BoundedFolder
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet, compute_outputs
from perennial.learning.evaluation_tables import (
    CONFIDENCE_BINS,
    CONFIDENCE_EDGES,
    LARGEST_LIKELIHOOD,
    LIKELIHOOD_STEP,
    SCORE_BINS,
    SCORE_EDGES,
    TEMPERATURES,
    EvaluationTables,
    compute_even_odds,
)
from perennial.models.class_means import build_nearest_mean
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.incremental import IncrementalModel
from perennial.models.prediction import log_odds


@dataclass(frozen=True, eq=False)
class Scored:
    """Answers of one model of M classes for n samples; logits were divided by a temperature.

    label, predicted: (n,) int64. score: (n, M) int16 bin of each class's log odds. confidence: (n, 2) uint8
    bin of the answer's probability, at temperature 1 and at that of the scores.
    """

    label: np.ndarray
    predicted: np.ndarray
    score: np.ndarray
    confidence: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    @property
    def correct(self) -> list[int]:
        """(M,) number of right answers for each class."""
        right = self.label[self.label == self.predicted]
        return np.bincount(right, minlength=self.score.shape[1]).tolist()

    @property
    def total(self) -> list[int]:
        """(M,) number of samples of each class."""
        return np.bincount(self.label, minlength=self.score.shape[1]).tolist()

    def pick(self, rows: np.ndarray) -> "Scored":
        """The samples at rows, (m,) int64 or (n,) bool."""
        return Scored(**{name: array[rows] for name, array in vars(self).items()})

    def build_tables(
        self, weights: np.ndarray | None = None, subgroup: np.ndarray | None = None, subgroups: int = 0
    ) -> EvaluationTables:
        """Count the samples into EvaluationTables; likelihood, validation and calibration stay 0.

        weights: (n,) int64, how often each counts; None: once. subgroup: (n,) int64, -1 or None: in none.
        """
        classes = self.score.shape[1]
        each = np.ones(len(self), dtype=np.int64) if weights is None else weights
        found = EvaluationTables.empty(classes, subgroups)
        np.add.at(found.confusion, (self.label, self.predicted), each)
        own, every = self._count_scores(each)
        found.positive[...] = own
        found.negative[...] = every - own
        right = self.label == self.predicted
        for index in range(2):
            for kind, counted in enumerate((each, each * right)):
                found.confidence[index, kind] = _count_bins(
                    self.confidence[:, index], counted, CONFIDENCE_BINS
                )
        if subgroup is not None:
            known = subgroup >= 0
            group, label, called, hit = (
                array[known] for array in (subgroup, self.label, self.predicted, right)
            )
            samples, right_answers, called_so = np.moveaxis(found.subgroups, 2, 0)
            np.add.at(samples, (group, label), each[known])
            np.add.at(right_answers, (group, label), each[known] * hit)
            np.add.at(called_so, (group, called), each[known])
        return found

    def _count_scores(self, each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(M, S) samples of each class by its score, and all samples by it."""
        classes = self.score.shape[1]
        own = np.zeros((classes, SCORE_BINS), dtype=np.int64)
        rows = np.arange(len(self))
        np.add.at(own, (self.label, self.score[rows, self.label]), each)
        every = np.stack([_count_bins(self.score[:, label], each, SCORE_BINS) for label in range(classes)])
        return own, every

    def scores(self) -> np.ndarray:
        """(2, M, S) samples of each class, and of all others, by the score of that class."""
        own, every = self._count_scores(np.ones(len(self), dtype=np.int64))
        return np.stack([own, every - own])


def score(
    model: IncrementalModel,
    data: TrainingSet,
    means: Tensor | None = None,
    folder: BoundedFolder | None = None,
    among: Tensor | None = None,
    temperature: float | None = None,
) -> Scored:
    """Score samples under a model's head, or under class means instead.

    means: as over_features takes them; None: the head. folder: where features of fixed maps may be stored;
    None: in memory. among: (m,) int64, the samples to score; None: all. temperature: divides logits; None: 1.
    """
    classify, rows = build_classifier(model, data, means, folder)
    return score_logits(classify, rows, model.num_classes, among, temperature)


def build_classifier(
    model: IncrementalModel, data: TrainingSet, means: Tensor | None, folder: BoundedFolder | None
) -> tuple[Callable[[Tensor], Tensor], TrainingSet]:
    """(function from inputs (B, ...) to logits (B, M), the data that it takes), for a head or class means.

    With fixed feature maps the data's samples are replaced by their features. means, folder: as for score.
    """
    model.eval()
    if means is not None:
        return build_nearest_mean(model, means), data
    if isinstance(model.backbone, FixedFeatures) and len(data):
        from perennial.learning.feature_bank import open_bank

        return model.classify, open_bank(model.backbone, data, folder).build_feature_set(model.backbone, data)
    return model, data


@torch.no_grad()
def score_logits(
    classify: Callable[[Tensor], Tensor],
    data: TrainingSet,
    classes: int,
    among: Tensor | None = None,
    temperature: float | None = None,
) -> Scored:
    """Score data with a function from inputs (B, ...) to logits (B, M). among, temperature: as for score."""
    labels = data.y if among is None else data.y[among]
    logits = compute_outputs(classify, data, among) if len(labels) else torch.zeros(0, classes)
    batches = zip(logits.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True)
    parts = [bin_logits(*batch, temperature) for batch in batches]
    return Scored(*(np.concatenate([part[index] for part in parts]) for index in range(4)))


@torch.no_grad()
def compute_likelihoods(classify: Callable[[Tensor], Tensor], data: TrainingSet) -> np.ndarray:
    """(2, K) negative log-likelihoods of all samples together, as EvaluationTables counts them.

    classify: from inputs (B, ...) to logits (B, M).
    """
    found = np.zeros((2, len(TEMPERATURES)), dtype=np.int64)
    answers = compute_outputs(classify, data).split(EVALUATION_BATCH) if len(data) else ()
    for batch, labels in zip(answers, data.y.split(EVALUATION_BATCH), strict=False):
        logits = batch.double()
        for place, temperature in enumerate(TEMPERATURES):
            log_p = (logits / temperature).log_softmax(dim=1)
            loss = (-log_p).nan_to_num(nan=LARGEST_LIKELIHOOD).clamp(0, LARGEST_LIKELIHOOD)
            likeliest = loss.topk(min(2, loss.shape[1]), dim=1, largest=False).values
            both = torch.stack([loss.gather(1, labels[:, None]).squeeze(1), likeliest.mean(dim=1)])
            found[:, place] += (both / LIKELIHOOD_STEP).round().long().sum(dim=1).cpu().numpy()
    return found


def bin_logits(logits: Tensor, labels: Tensor, temperature: float | None = None) -> tuple[np.ndarray, ...]:
    """(label, predicted, score, confidence) as in Scored.

    Score: (B, M) bins of log odds at the temperature. Confidence: (B, 2) bins of the largest probability, at
    temperature 1 and at the given one. Predicted does not depend on it.

    logits: (B, M), -inf for a class that is never predicted. labels: (B,). temperature: None for 1.
    """
    exact = logits.double()
    scaled = exact / (temperature or 1.0)
    edges = torch.from_numpy(SCORE_EDGES + compute_even_odds(logits.shape[1])).to(logits.device)
    scores = torch.bucketize(log_odds(scaled), edges, right=True)
    top = torch.stack([each.softmax(dim=1).max(dim=1).values for each in (exact, scaled)], dim=1)
    edges = torch.from_numpy(CONFIDENCE_EDGES).to(logits.device)
    bins = torch.bucketize(top.nan_to_num(nan=0.0), edges, right=True)
    return tuple(
        tensor.cpu().numpy()
        for tensor in (labels, exact.argmax(dim=1), scores.to(torch.int16), bins.to(torch.uint8))
    )


def _count_bins(bins: np.ndarray, weights: np.ndarray, length: int) -> np.ndarray:
    # float64 holds every count below 2^53 exactly
    return np.bincount(bins, weights=weights, minlength=length).astype(np.int64)


Utility = Literal["accuracy", "probability"]
Worth = Sequence[float | None]
"""(M,) from 0 to 1: what a model is worth on each class; None for a class without held-out samples."""


@dataclass(frozen=True)
class Scores:
    """A model's answers on held-out samples.

    labels: (n,) int64, below `classes`. right: (n,) bool. probability: (n,) float64, of the true class.
    """

    classes: int
    labels: NDArray[np.int64]
    right: NDArray[np.bool_]
    probability: NDArray[np.float64]

    def values(self, utility: Utility) -> NDArray[np.float64]:
        """(n,) from 0 to 1: whether each answer is right, or the probability of the true class."""
        return self.right.astype(np.float64) if utility == "accuracy" else self.probability

    def by_class(self, utility: Utility) -> list[float | None]:
        """(M,) mean value of each class's samples; None for a class without samples."""
        samples = np.bincount(self.labels, minlength=self.classes)
        sums = np.bincount(self.labels, self.values(utility), minlength=self.classes)
        return [float(s / n) if n else None for s, n in zip(sums, samples, strict=True)]

    def change(self, before: "Scores", utility: Utility) -> tuple[float, float]:
        """(balanced utility minus that of `before`, its standard error), both of the same samples."""
        moved = self.values(utility) - before.values(utility)
        found = [moved[self.labels == label] for label in np.unique(self.labels)]
        error = sum(float(rows.var(ddof=1)) / len(rows) for rows in found if len(rows) > 1) ** 0.5
        return float(np.mean([rows.mean() for rows in found])), error / len(found)


def average_classes(worth: Worth) -> float:
    """Mean over the classes that have held-out samples, each class counting alike; 0 if there are none."""
    known = [value for value in worth if value is not None]
    return sum(known) / len(known) if known else 0.0


def subtract_worth(after: Worth, before: Worth) -> list[float | None]:
    """(M,) after minus before for each class; None if either is None."""
    return [None if a is None or b is None else a - b for a, b in zip(after, before, strict=False)]
