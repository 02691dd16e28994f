"""Whether stated probabilities are true, before and after temperature scaling."""

from dataclasses import dataclass

import numpy as np

from perennial.learning.evaluation_tables import CONFIDENCE_BINS, TEMPERATURES, EvaluationTables
from perennial.server.measures.figure import UNMEASURED, Figure

GROUPS = 20
"""Groups of equal width that answers are put in by their probability."""
RESAMPLES = 1000
MIDDLES = (np.arange(CONFIDENCE_BINS) + 0.5) / CONFIDENCE_BINS


@dataclass(frozen=True)
class Reliability:
    """Answers in one group of probabilities: their number, mean probability, and share of right ones."""

    samples: int
    stated: float
    right: float


def chosen_temperature(tables: EvaluationTables) -> float | None:
    """The temperature of the least negative log-likelihood on the validation samples; None without any.

    Guo et al. 2017 (arXiv 1706.04599).
    """
    if not tables.validation[0]:
        return None
    return TEMPERATURES[int(np.argmin(tables.likelihood))]


def at(temperature: float, tables: EvaluationTables) -> np.ndarray:
    """(2, C) samples and right answers by the answer's probability at one of TEMPERATURES."""
    return tables.confidence[TEMPERATURES.index(temperature)]


def expected_calibration_error(confidence: np.ndarray) -> float | None:
    """Mean over samples of how far the stated probability of its group is from the share of right answers.

    confidence: (2, C) as in EvaluationTables. A probability is known to half a bin, 0.5 points.
    Naeini et al. 2015 (doi 10.1609/aaai.v29i1.9602).
    """
    samples, right = confidence.reshape(2, GROUPS, -1)
    if not samples.sum():
        return None
    stated = (samples * MIDDLES.reshape(GROUPS, -1)).sum(axis=1)
    return float(np.abs(stated - right.sum(axis=1)).sum() / samples.sum())


def calibration_error(confidence: np.ndarray, seed: int = 0) -> Figure:
    """expected_calibration_error with the basic bootstrap's interval over samples.

    The basic interval mirrors the resampled values at the estimate, which takes out the upward bias that the
    error of a small sample has.
    """
    value = expected_calibration_error(confidence)
    if value is None:
        return UNMEASURED
    samples, right = confidence
    cells = np.concatenate([right, samples - right])
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(int(cells.sum()), cells / cells.sum(), size=RESAMPLES)
    hits, misses = drawn[:, :CONFIDENCE_BINS], drawn[:, CONFIDENCE_BINS:]
    both = hits + misses
    stated = (both * MIDDLES).reshape(RESAMPLES, GROUPS, -1).sum(axis=2)
    found = np.abs(stated - hits.reshape(RESAMPLES, GROUPS, -1).sum(axis=2)).sum(axis=1) / cells.sum()
    upper, lower = np.quantile(found, [0.975, 0.025])
    low, high = max(0.0, 2 * value - upper), min(1.0, 2 * value - lower)
    return Figure(value=value, low=min(low, value), high=max(high, value))


def reliability(confidence: np.ndarray) -> list[Reliability]:
    """The groups that have answers, from the least probable to the most."""
    samples, right = confidence.reshape(2, GROUPS, -1)
    middles = MIDDLES.reshape(GROUPS, -1)
    return [
        Reliability(int(n.sum()), float((n * middle).sum() / n.sum()), float(hits.sum() / n.sum()))
        for n, hits, middle in zip(samples, right, middles, strict=True)
        if n.sum()
    ]
