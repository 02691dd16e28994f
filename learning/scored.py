"""What a classifier says of samples, binned as the tables of an evaluation count it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.bounded_folder import BoundedFolder
from perennial.learning.batches import EVALUATION_BATCH, TrainingSet
from perennial.learning.evaluation_tables import (
    CONFIDENCE_BINS,
    LARGEST_LIKELIHOOD,
    LIKELIHOOD_STEP,
    SCORE_BINS,
    SCORE_EDGES,
    TEMPERATURES,
    EvaluationTables,
)
from perennial.learning.feature_bank import bank_of
from perennial.models.class_means import over_features
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.incremental import IncrementalModel


@dataclass(frozen=True, eq=False)
class Scored:
    """n samples under one model of M classes.

    label, predicted: (n,) int64. score: (n, M) uint8 bin of each class's log odds. confidence: (n, K) uint8
    bin of the answer's probability at each temperature. likelihood: (n, K) int64 negative log-likelihood.
    """

    label: np.ndarray
    predicted: np.ndarray
    score: np.ndarray
    confidence: np.ndarray
    likelihood: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    @property
    def correct(self) -> list[int]:
        """Right answers of each class."""
        right = self.label[self.label == self.predicted]
        return np.bincount(right, minlength=self.score.shape[1]).tolist()

    @property
    def total(self) -> list[int]:
        """Samples of each class."""
        return np.bincount(self.label, minlength=self.score.shape[1]).tolist()

    def pick(self, rows: np.ndarray) -> "Scored":
        """The samples at rows, (m,) int64 or (n,) bool."""
        return Scored(**{name: array[rows] for name, array in vars(self).items()})

    def tables(
        self, weights: np.ndarray | None = None, subgroup: np.ndarray | None = None, subgroups: int = 0
    ) -> EvaluationTables:
        """How often each thing happened; likelihood and calibration stay empty.

        weights: (n,) int64, how often each sample counts; None: once. subgroup: (n,) int64, -1 for none.
        """
        classes = self.score.shape[1]
        each = np.ones(len(self), dtype=np.int64) if weights is None else weights
        found = EvaluationTables.empty(classes, subgroups)
        np.add.at(found.confusion, (self.label, self.predicted), each)
        own, every = self._scores(each)
        found.positive[...] = own
        found.negative[...] = every - own
        right = self.label == self.predicted
        for index in range(len(TEMPERATURES)):
            for kind, counted in enumerate((each, each * right)):
                found.confidence[index, kind] = _counted(self.confidence[:, index], counted, CONFIDENCE_BINS)
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

    def _scores(self, each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(M, S) samples of each class by its score, and all samples by it."""
        classes = self.score.shape[1]
        own = np.zeros((classes, SCORE_BINS), dtype=np.int64)
        rows = np.arange(len(self))
        np.add.at(own, (self.label, self.score[rows, self.label]), each)
        every = np.stack([_counted(self.score[:, label], each, SCORE_BINS) for label in range(classes)])
        return own, every

    def own_scores(self) -> np.ndarray:
        """(M, S) samples of each class by the score of that class."""
        return self._scores(np.ones(len(self), dtype=np.int64))[0]


def score(
    model: IncrementalModel,
    data: TrainingSet,
    means: Tensor | None = None,
    folder: BoundedFolder | None = None,
    among: Tensor | None = None,
) -> Scored:
    """The samples under a model with its head, or with means instead: as over_features takes them.

    folder: where the answers of fixed feature maps may be kept; None: in memory. among: (m,) int64, the
    samples to look at; None: all.
    """
    classify, rows = classifier(model, data, means, folder)
    return score_logits(classify, rows, model.num_classes, among)


def classifier(
    model: IncrementalModel, data: TrainingSet, means: Tensor | None, folder: BoundedFolder | None
) -> tuple[Callable[[Tensor], Tensor], TrainingSet]:
    """(function from inputs (B, ...) to logits (B, M), what to give it): fixed maps answer once a sample."""
    model.eval()
    if means is not None:
        return over_features(model, means), data
    if isinstance(model.backbone, FixedFeatures) and len(data):
        return model.classify, bank_of(model.backbone, data, folder).feature_set(model.backbone, data)
    return model, data


@torch.no_grad()
def score_logits(
    classify: Callable[[Tensor], Tensor], data: TrainingSet, classes: int, among: Tensor | None = None
) -> Scored:
    """Score data with a function from inputs (B, ...) to logits (B, M). among: as of score."""
    parts = [
        bin_logits(classify(data.inputs(rows)), data.y[rows])
        for start in range(0, len(data) if among is None else len(among), EVALUATION_BATCH)
        for batch in (slice(start, start + EVALUATION_BATCH),)
        for rows in (batch if among is None else among[batch],)
    ] or [bin_logits(torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64))]
    return Scored(*(np.concatenate([part[index] for part in parts]) for index in range(5)))


def bin_logits(logits: Tensor, labels: Tensor) -> tuple[np.ndarray, ...]:
    """The arrays of Scored. logits: (B, M), where -inf is a class that is never predicted. labels: (B,)."""
    exact = logits.double()
    predicted = exact.argmax(dim=1)
    log_p = exact.log_softmax(dim=1)
    # 1 - p from log p without cancellation; a certain class has infinite odds, and an impossible one -inf
    odds = (log_p - (-torch.expm1(log_p)).log()).nan_to_num(nan=-torch.inf)
    edges = torch.from_numpy(SCORE_EDGES).to(odds.device)
    scores = torch.bucketize(odds, edges, right=True)
    temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64, device=odds.device)
    # (B, K, M), a batch at a time
    scaled = (exact[:, None, :] / temperatures[None, :, None]).log_softmax(dim=2)
    top = scaled.max(dim=2).values.exp().nan_to_num(nan=0.0)
    bins = (top * CONFIDENCE_BINS).long().clamp(0, CONFIDENCE_BINS - 1)
    chosen = labels[:, None, None].expand(-1, len(TEMPERATURES), 1)
    loss = -scaled.gather(2, chosen).squeeze(2) if len(labels) else scaled.new_zeros(0, len(TEMPERATURES))
    steps = (loss.nan_to_num(nan=LARGEST_LIKELIHOOD).clamp(0, LARGEST_LIKELIHOOD) / LIKELIHOOD_STEP).round()
    return tuple(
        tensor.cpu().numpy()
        for tensor in (labels, predicted, scores.to(torch.uint8), bins.to(torch.uint8), steps.long())
    )


def _counted(bins: np.ndarray, weights: np.ndarray, length: int) -> np.ndarray:
    # float64 holds every count below 2^53 exactly
    return np.bincount(bins, weights=weights, minlength=length).astype(np.int64)
