"""Prediction sets: for each class the score from which a sample's set includes it.

Class-conditional split conformal prediction (Vovk 2012, arXiv 1209.2673). For a new sample of a class, drawn
as the calibration samples of that class were, the set holds the class with at least the stated probability,
on average over calibration samples. That holds for the mixture of the sites that calibrated, not for each of
them, and says nothing of classes that the model does not know.
"""

import math
from dataclasses import dataclass

import numpy as np

from perennial.learning.evaluation_tables import SCORE_BINS, score_bin_lower


@dataclass(frozen=True)
class Threshold:
    """The least log odds of a class with which it is in the set; -inf includes it always.

    samples: calibration samples of the class. informative: whether they suffice to ever leave it out.
    """

    log_odds: float
    samples: int
    informative: bool


def least_samples(coverage: float) -> int:
    """ceil(1/alpha) - 1, the fewest calibration samples of a class with which it can ever be left out."""
    return math.ceil(round(1 / (1 - coverage), 9)) - 1


def threshold(scores: np.ndarray, coverage: float, classes: int) -> Threshold:
    """The threshold of one class.

    scores: (S,) its calibration samples by the bin of the class's own probability, lowest first. classes: M.
    The nonconformity of a sample is 1 minus that probability. The threshold is the upper edge, in
    nonconformity, of the bin that holds the sample of rank ceil((n + 1) coverage): the lower edge of its bin
    in probability. Beyond n every set includes the class.
    """
    samples = int(scores.sum())
    # the product of two floats may be a hair above a whole number
    rank = math.ceil(round((samples + 1) * coverage, 9))
    if rank > samples:
        return Threshold(-math.inf, samples, informative=False)
    from_the_top = np.cumsum(scores[::-1])
    index = SCORE_BINS - 1 - int(np.searchsorted(from_the_top, rank))
    return Threshold(score_bin_lower(index, classes), samples, informative=True)


def thresholds(calibration: np.ndarray, coverage: float) -> list[Threshold]:
    """The threshold of each class. calibration: (M, S), as in EvaluationTables."""
    return [threshold(scores, coverage, len(calibration)) for scores in calibration]
