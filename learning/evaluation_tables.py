"""Tables of counts from which every measure of a classifier follows, and which add up over sites.

Shapes: M classes, G subgroups, S score bins, C confidence bins, K temperatures. All edges are public and the
same everywhere, so that a table says how many samples fell into each bin and nothing else about them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

SCORE_EDGES = np.linspace(-12.0, 12.0, 127)
"""Edges between the 128 bins of a class's score, which is the log odds of its probability."""
SCORE_BINS = len(SCORE_EDGES) + 1
CONFIDENCE_BINS = 100
"""Of equal width, over the probabilities from 0 to 1."""
TEMPERATURES = tuple(float(t) for t in 2.0 ** (np.arange(-8, 13) / 4))
"""0.25 to 8 in steps of a quarter of an octave; 1 leaves probabilities as they are."""
LIKELIHOOD_STEP = 2.0**-16
"""Unit in which negative log-likelihoods are counted, so that they add up exactly."""
LARGEST_LIKELIHOOD = 64.0
"""Of one sample: one outlier must not decide the temperature."""
MOST_CLASSES = 200
"""With more classes right answers alone are counted: a confusion matrix grows with their square."""


@dataclass(frozen=True, eq=False)
class EvaluationTables:
    """Counts, int64, of one site or of several together.

    confusion: (M, M) samples by their class and by what the model called them.
    positive, negative: (M, S) samples of the class, and of all other classes, by the class's score.
    confidence: (K, 2, C) samples, and right answers, by the probability of the answer at each temperature.
    likelihood: (K,) negative log-likelihood at each temperature, of validation samples, in LIKELIHOOD_STEP.
    validation: (1,) the number of those samples.
    calibration: (M, S) calibration samples by the score of their own class.
    subgroups: (G, M, 3) of each subgroup and class: samples, right answers, samples that were called so.
    """

    confusion: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    confidence: np.ndarray
    likelihood: np.ndarray
    validation: np.ndarray
    calibration: np.ndarray
    subgroups: np.ndarray

    @classmethod
    def empty(cls, classes: int, subgroups: int = 0) -> "EvaluationTables":
        """Tables of no sample."""
        shapes = _shapes(classes, subgroups)
        return cls(**{name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()})

    @classmethod
    def from_vector(cls, counts: np.ndarray, classes: int, subgroups: int = 0) -> "EvaluationTables":
        """The inverse of vector(). Raises ValueError when it has another length."""
        shapes = _shapes(classes, subgroups)
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        if len(counts) != sum(sizes):
            raise ValueError(f"tables: found {len(counts)} counts, expected {sum(sizes)}")
        parts = np.split(np.asarray(counts, dtype=np.int64), np.cumsum(sizes)[:-1])
        return cls(
            **{name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        )

    def vector(self) -> np.ndarray:
        """(N,) all counts, one table after the other."""
        return np.concatenate([getattr(self, field.name).ravel() for field in fields(self)])

    def __add__(self, other: "EvaluationTables") -> "EvaluationTables":
        return EvaluationTables(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )

    @property
    def classes(self) -> int:
        """M."""
        return len(self.confusion)

    @property
    def samples(self) -> int:
        """How many the confusion matrix counts."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> list[int]:
        """Right answers of each class."""
        return self.confusion.diagonal().tolist()

    @property
    def total(self) -> list[int]:
        """Samples of each class."""
        return self.confusion.sum(axis=1).tolist()

    def by_class(self) -> np.ndarray:
        """(M, 3) samples, right answers, samples that were called so."""
        return np.stack(
            [self.confusion.sum(axis=1), self.confusion.diagonal(), self.confusion.sum(axis=0)], axis=1
        )


def _shapes(classes: int, subgroups: int) -> dict[str, Sequence[int]]:
    scores = (classes, SCORE_BINS)
    return {
        "confusion": (classes, classes),
        "positive": scores,
        "negative": scores,
        "confidence": (len(TEMPERATURES), 2, CONFIDENCE_BINS),
        "likelihood": (len(TEMPERATURES),),
        "validation": (1,),
        "calibration": scores,
        "subgroups": (subgroups, classes, 3),
    }


def score_bin_upper(index: int) -> float:
    """Upper edge of a score bin, as a probability; 1 for the last one."""
    return 1.0 if index >= len(SCORE_EDGES) else float(1 / (1 + np.exp(-SCORE_EDGES[index])))


def score_bin_lower(index: int) -> float:
    """Lower edge of a score bin, as a probability; 0 for the first one."""
    return 0.0 if index <= 0 else float(1 / (1 + np.exp(-SCORE_EDGES[index - 1])))
