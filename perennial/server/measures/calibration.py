"""Measures whether stated probabilities are true, before and after temperature scaling."""

import math
from dataclasses import dataclass

import numpy as np

from perennial.learning.evaluation_tables import (
    CONFIDENCE_BINS,
    CONFIDENCE_EDGES,
    SCORE_BINS,
    TEMPERATURES,
    EvaluationTables,
    score_bin_lower,
)
from perennial.server.measures.record import UNMEASURED, Figure, ReliabilityGroup

GROUPS = 20
"""Groups of equal width that answers are put in by their probability."""
RESAMPLES = 1000
_ENDS = np.concatenate([[0.0], CONFIDENCE_EDGES, [1.0]])
MIDDLES = (_ENDS[:-1] + _ENDS[1:]) / 2
_STARTS = np.searchsorted(_ENDS[:-1], np.arange(GROUPS) / GROUPS - 1e-9)
"""The first confidence bin of each group."""


def fit_temperature(tables: EvaluationTables) -> float | None:
    """The temperature of the least negative log-likelihood on the validation samples; None without any.

    Guo et al. 2017 (arXiv 1706.04599), with one sample more that is half its answer and half the class next
    to it, as Jeffreys' prior has it: without it samples that are all correct would ask for certainty.
    Any class alike in its place is too cautious where there are few samples and some classes are far away.
    """
    samples = int(tables.validation[0])
    if not samples:
        return None
    true, undecided = tables.likelihood.astype(np.float64)
    return TEMPERATURES[int(np.argmin(true + undecided / samples))]


def is_at_end(temperature: float | None) -> bool:
    """Whether a temperature is the first or the last that is tried, so that a better one may lie beyond."""
    return temperature in (TEMPERATURES[0], TEMPERATURES[-1])


def compute_ece(confidence: np.ndarray) -> float | None:
    """Mean over samples of |mean stated probability - share of right answers| in their group.

    confidence: (2, C), one of those in EvaluationTables. A probability is known to half a bin: at most 0.5
    points, and less near certainty. None without samples.
    Naeini et al. 2015 (doi 10.1609/aaai.v29i1.9602).
    """
    samples, right = confidence
    if not samples.sum():
        return None
    return float(np.abs(_sum_groups(samples * MIDDLES - right)).sum() / samples.sum())


def estimate_calibration_error(confidence: np.ndarray, seed: int = 0) -> Figure:
    """expected_calibration_error with the basic bootstrap's interval over samples.

    The basic interval mirrors the resampled values at the estimate, which takes out the upward bias that the
    error of a small sample has.
    """
    value = compute_ece(confidence)
    if value is None:
        return UNMEASURED
    samples, right = confidence
    cells = np.concatenate([right, samples - right])
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(int(cells.sum()), cells / cells.sum(), size=RESAMPLES)
    hits, misses = drawn[:, :CONFIDENCE_BINS], drawn[:, CONFIDENCE_BINS:]
    both = hits + misses
    found = np.abs(_sum_groups(both * MIDDLES - hits)).sum(axis=1) / cells.sum()
    upper, lower = np.quantile(found, [0.975, 0.025])
    low, high = max(0.0, 2 * value - upper), min(1.0, 2 * value - lower)
    return Figure(value=value, low=min(low, value), high=max(high, value))


def estimate_chance_error(confidence: np.ndarray, seed: int = 0) -> Figure:
    """The error that true probabilities would show on as many answers: its mean, and the interval of 95 %.

    With few answers the shares of right ones are far from any probability by chance alone. Answers are taken
    for independent. Confidence is as in expected_calibration_error.
    Broecker and Smith 2007 (doi 10.1175/WAF993.1).
    """
    samples = confidence[0]
    if not samples.sum():
        return UNMEASURED
    right = np.random.default_rng(seed).binomial(samples, MIDDLES, size=(RESAMPLES, CONFIDENCE_BINS))
    found = np.abs(_sum_groups(samples * MIDDLES - right)).sum(axis=1) / samples.sum()
    low, high = np.quantile(found, [0.025, 0.975])
    return Figure(value=float(found.mean()), low=float(low), high=float(high))


def compute_reliability(confidence: np.ndarray) -> list[ReliabilityGroup]:
    """The groups of answers with similar stated probability, lowest first, without empty ones."""
    samples, right = confidence
    groups = zip(_sum_groups(samples), _sum_groups(samples * MIDDLES), _sum_groups(right), strict=True)
    return [
        ReliabilityGroup(samples=int(n), stated=float(stated / n), right=float(hits / n))
        for n, stated, hits in groups
        if n
    ]


def _sum_groups(bins: np.ndarray) -> np.ndarray:
    """(..., GROUPS) sums over the bins of each group. bins: (..., C)."""
    return np.add.reduceat(bins, _STARTS, axis=-1)


@dataclass(frozen=True)
class Threshold:
    """The least log odds of a class with which it is in the set; -inf includes it always.

    samples: calibration samples of the class. informative: whether they suffice to ever leave it out.
    """

    log_odds: float
    samples: int
    informative: bool


def compute_least_samples(coverage: float) -> int:
    """ceil(1/alpha) - 1, the fewest calibration samples of a class with which it can ever be left out."""
    return math.ceil(round(1 / (1 - coverage), 9)) - 1


def compute_threshold(scores: np.ndarray, coverage: float, classes: int) -> Threshold:
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


def compute_thresholds(calibration: np.ndarray, coverage: float) -> list[Threshold]:
    """The threshold of each class. calibration: (M, S), as in EvaluationTables."""
    return [compute_threshold(scores, coverage, len(calibration)) for scores in calibration]
