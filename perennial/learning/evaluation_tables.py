"""Tables of counts from which every measure of a classifier follows, and which add up over sites.

Shapes: M classes, G subgroups, S score bins, C confidence bins, K temperatures. All edges are public and the
same everywhere, so that a table says how many samples fell into each bin and nothing else about them. Scores
are binned at a temperature that validation samples chose in an exchange before: at another one a head's
scores can all lie in one bin, and classes of several rank differently.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

_MIDDLE = 0.05 * np.sinh(np.linspace(0, np.arcsinh(20 / 0.05), 193))
_TAIL = np.sinh(np.linspace(np.arcsinh(20), np.arcsinh(1e5), 64))[1:]
SCORE_EDGES = np.concatenate([-_TAIL[::-1], -_MIDDLE[:0:-1], _MIDDLE, _TAIL])
"""Edges between the 512 bins of a class's score: by how much the log odds of its probability exceed those of
one class of many alike. They are even in asinh: 0.002 apart in the middle, where a head that hardly knows
puts all its scores, then a 29th of the score up to 20, and a 7th up to 100,000."""
SCORE_BINS = len(SCORE_EDGES) + 1
CONFIDENCE_EDGES = np.union1d(np.arange(1, 100) / 100, [0.9925, 0.995, 0.9975, 0.999, 0.9999])
"""Edges between the bins of an answer's probability: whole percents, and finer ones near certainty."""
CONFIDENCE_BINS = len(CONFIDENCE_EDGES) + 1
TEMPERATURES = tuple(float(t) for t in 2.0 ** (np.arange(-40, 57) / 4))
"""0.001 to 16,384 in steps of a quarter of an octave; 1 leaves probabilities as they are."""
LIKELIHOOD_STEP = 2.0**-16
"""Unit in which negative log-likelihoods are counted, so that they add up exactly."""
LARGEST_LIKELIHOOD = 64.0
"""Of one sample: one outlier must not decide the temperature."""
MOST_CLASSES = 200
"""With more classes right answers alone are counted: a confusion matrix grows with their square."""


@dataclass(frozen=True, eq=False)
class EvaluationTables:
    """Counts, int64, of one site or of several together.

    confusion: (M, M) samples by their class and by the class predicted.
    positive, negative: (M, S) samples of the class, and of all other classes, by the class's score.
    confidence: (2, 2, C) samples, and right answers, by the probability of the answer: at temperature 1, and
    at that of the scores.
    likelihood: (2, K) negative log-likelihood of validation samples at each temperature, in LIKELIHOOD_STEP:
    of the true class, and the mean of the two most probable classes.
    validation: (1,) the number of those samples.
    calibration: (2, M, S) calibration samples of the class, and of all others, by the class's score.
    subgroups: (G, M, 3) of each subgroup and class: samples, right answers, samples predicted as the class.
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
        shapes = _list_shapes(classes, subgroups)
        return cls(**{name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()})

    @classmethod
    def from_vector(cls, counts: np.ndarray, classes: int, subgroups: int = 0) -> "EvaluationTables":
        """The tables whose vector() is `counts`. Raises ValueError when it has another length."""
        shapes = _list_shapes(classes, subgroups)
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
        return len(self.confusion)

    @property
    def samples(self) -> int:
        """Number of samples in the confusion matrix."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> list[int]:
        """(M,) number of right answers for each class."""
        return self.confusion.diagonal().tolist()

    @property
    def total(self) -> list[int]:
        """(M,) number of samples of each class."""
        return self.confusion.sum(axis=1).tolist()

    def by_class(self) -> np.ndarray:
        """(M, 3) for each class: samples, right answers, samples predicted as it."""
        return np.stack(
            [self.confusion.sum(axis=1), self.confusion.diagonal(), self.confusion.sum(axis=0)], axis=1
        )


def _list_shapes(classes: int, subgroups: int) -> dict[str, Sequence[int]]:
    scores = (classes, SCORE_BINS)
    return {
        "confusion": (classes, classes),
        "positive": scores,
        "negative": scores,
        "confidence": (2, 2, CONFIDENCE_BINS),
        "likelihood": (2, len(TEMPERATURES)),
        "validation": (1,),
        "calibration": (2, *scores),
        "subgroups": (subgroups, classes, 3),
    }


def compute_even_odds(classes: int) -> float:
    """Log odds of each of so many equally probable classes, from which score bins are counted."""
    return -math.log(max(1, classes - 1))


def score_bin_lower(index: int, classes: int) -> float:
    """Lower edge of score bin `index` in log odds; -inf for the first one."""
    return -math.inf if index <= 0 else float(SCORE_EDGES[index - 1]) + compute_even_odds(classes)


def find_least_score_bin(log_odds: float, classes: int) -> int:
    """The first score bin whose samples all have these log odds or more; they must be a bin's lower edge."""
    return int(np.searchsorted(SCORE_EDGES + compute_even_odds(classes), log_odds, side="right"))


def as_probability(log_odds: float) -> float:
    """Convert log odds to a probability; beyond 36 it is 1 to the last bit of a double."""
    return math.exp(-np.logaddexp(0.0, -log_odds))
