"""Areas under the ROC and the precision-recall curve, from histograms of scores.

Samples of one bin count as ties in the first, and as evenly mixed in the second.
"""

import numpy as np

from perennial.server.measures.figure import UNMEASURED, Figure, logit_interval

MOST_PARTS = 16


def roc_areas(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """(M,) probability that a sample of the class scores higher than one of another; NaN without either.

    positive, negative: (M, S) samples of the class and of the others by score bin, lowest first.
    """
    of_class, others = positive.sum(axis=1), negative.sum(axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((positive * below).sum(axis=1) / (of_class * others), dtype=np.float64)


def precision_recall_areas(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """(M,) average precision: the precision at each sample of the class, highest score first, on average.

    Within a bin the class's samples are spread evenly among the others: counting the whole bin as called
    before the first of them would be too low by several points if samples are few.
    positive, negative: as in roc_areas. NaN without a sample of the class or of another.
    """
    own, rest = positive[:, ::-1].astype(np.float64), negative[:, ::-1].astype(np.float64)
    hits, called = np.cumsum(own, axis=1) - own, np.cumsum(own + rest, axis=1) - own - rest
    # beyond so many samples in a bin they are taken in equal groups
    parts = np.clip(own, 1, MOST_PARTS)
    areas = np.zeros_like(own)
    for part in range(int(parts.max(initial=0))):
        share = (part + 1) / parts
        found = hits + own * share
        wrong = called - hits + rest * (part + 0.5) / parts
        areas += np.where(part < parts, own / parts * found / np.maximum(found + wrong, 1e-9), 0.0)
    of_class, others = positive.sum(axis=1), negative.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, areas.sum(axis=1) / of_class, np.nan)


def auroc(positive: np.ndarray, negative: np.ndarray) -> Figure:
    """roc_areas of one class, (S,) each, with DeLong's interval in log odds.

    DeLong, DeLong and Clarke-Pearson 1988 (doi 10.2307/2531595).
    """
    of_class, others = int(positive.sum()), int(negative.sum())
    if of_class == 0 or others == 0:
        return UNMEASURED
    area = float(roc_areas(positive[None], negative[None])[0])
    # how much of the other group each sample of a bin beats, or is beaten by
    placed = (np.cumsum(negative) - negative / 2) / others
    beaten = (of_class - np.cumsum(positive) + positive / 2) / of_class
    variance = _variance(placed, positive) / of_class + _variance(beaten, negative) / others
    return logit_interval(area, float(np.sqrt(variance)), min(of_class, others))


def auprc(positive: np.ndarray, negative: np.ndarray) -> Figure:
    """precision_recall_areas of one class, (S,) each, with a binomial interval in log odds.

    The area is treated as a share of as many trials as the class has samples (Boyd, Eng and Page 2013,
    doi 10.1007/978-3-642-40994-3_29).
    """
    of_class = int(positive.sum())
    if of_class == 0 or int(negative.sum()) == 0:
        return UNMEASURED
    area = float(precision_recall_areas(positive[None], negative[None])[0])
    return logit_interval(area, float(np.sqrt(area * (1 - area) / of_class)), of_class)


def _variance(values: np.ndarray, counts: np.ndarray) -> float:
    """Sample variance of values that occur so often; 0 for a single one."""
    n = counts.sum()
    if n < 2:
        return 0.0
    mean = (values * counts).sum() / n
    return float(((values - mean) ** 2 * counts).sum() / (n - 1))
