"""An empirical lower bound on epsilon: what a distinguishing attack over many runs proves.

Under (epsilon, delta) no attack that tells two neighbours apart exceeds TPR <= e^epsilon FPR + delta. Many
runs with and without the record bound both rates with confidence, and so epsilon from below. A bound above
the claim shows that the mechanism does not do what is accounted; a bound below the claim proves nothing.

Jagielski et al. 2020 (arXiv 2006.07709); Nasr et al. 2021 (arXiv 2101.04535).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_THRESHOLDS = 512


@dataclass(frozen=True)
class Audit:
    """epsilon_floor holds with `confidence` at the claim's delta."""

    epsilon_floor: float
    delta: float
    confidence: float
    runs: int


def clopper_pearson(
    hits: ArrayLike, trials: int, error: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact lower and upper bounds on rates; each fails with probability at most error. hits: counts."""
    from scipy.special import betaincinv

    counts = np.asarray(hits, dtype=np.float64)
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), trials - counts + 1, error), 0.0)
    high = np.where(counts < trials, betaincinv(counts + 1, np.maximum(trials - counts, 1), 1 - error), 1.0)
    return low, high


def audit(with_record: Tensor, without: Tensor, delta: float, confidence: float = 0.95) -> Audit:
    """The largest epsilon that the attack's scores rule out.

    with_record, without: (runs,) one score for each independent run, higher where the attack sees the record.
    The first half of the runs chooses the threshold and the direction, the second half is counted, so that
    the choice cannot flatter the bound.
    Raises ValueError on fewer than 10 runs of either kind.
    """
    if min(len(with_record), len(without)) < 10:
        raise ValueError("an audit needs at least 10 runs with the record and 10 without")
    error = (1 - confidence) / 2
    (chosen_with, counted_with), (chosen_without, counted_without) = (
        scores.tensor_split(2) for scores in (with_record, without)
    )
    every = torch.cat([chosen_with, chosen_without]).unique()
    thresholds = every[torch.linspace(0, len(every) - 1, _THRESHOLDS).long()]
    floors = _floors(chosen_with, chosen_without, thresholds, delta, error)
    direction, position = np.unravel_index(int(np.argmax(floors)), floors.shape)
    floor = _floors(counted_with, counted_without, thresholds[position : position + 1], delta, error)[
        direction, 0
    ]
    return Audit(max(0.0, float(floor)), delta, confidence, min(len(with_record), len(without)))


def _floors(
    with_record: Tensor, without: Tensor, thresholds: Tensor, delta: float, error: float
) -> NDArray[np.float64]:
    """(2, thresholds) log((hit rate - delta) / alarm rate) at its pessimistic ends; -inf shows nothing.

    Row 0: scores above a threshold speak for the record. Row 1: scores at or below it speak against the
    record, which tests the opposite direction of the guarantee.
    """
    runs, others = len(with_record), len(without)
    below = torch.searchsorted(with_record.sort().values, thresholds, right=True).numpy()
    others_below = torch.searchsorted(without.sort().values, thresholds, right=True).numpy()
    directions = [
        (
            clopper_pearson(runs - below, runs, error)[0],
            clopper_pearson(others - others_below, others, error)[1],
        ),
        (clopper_pearson(others_below, others, error)[0], clopper_pearson(below, runs, error)[1]),
    ]
    with np.errstate(divide="ignore"):
        return np.stack([np.log(np.maximum(hits - delta, 0.0) / alarms) for hits, alarms in directions])
