"""What sites add to a ring's model: marginals by sweep, and shares of the gain with intervals."""

from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from perennial.learning.scored import Worth, balanced, difference

LEAST_GAIN = 1e-3
"""What shares are of, in a run that gained less."""


def shares(marginals: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(share, low, high), each (N,): each player's part of the whole gain, and one-sided bounds either way.

    The bounds cover at the number of sweeps that there are: Fieller's for a ratio of two means, with
    Student's quantile. If the gain itself is in doubt, and with one sweep, they are infinite.
    Fieller 1954, doi 10.1111/j.2517-6161.1954.tb00159.x.

    marginals: (S, N), a row for each sweep; their sum is the gain.
    """
    from scipy.special import stdtrit  # by use: a run without contribution values never needs it

    sweeps = len(marginals)
    gains = marginals.sum(axis=1)
    total = float(gains.sum())
    share = marginals.sum(axis=0) / max(total, LEAST_GAIN)
    low, high = np.full_like(share, -np.inf), np.full_like(share, np.inf)
    if sweeps < 2 or total <= 0:
        return share, low, high
    quantile = float(stdtrit(float(sweeps - 1), confidence)) ** 2
    mean, gain = marginals.mean(axis=0), total / sweeps
    centred, spread = marginals - mean, gains - gain
    factor = quantile / (sweeps - 1) / sweeps
    # the shares r for which |mean - r gain| is within its own uncertainty: a r^2 - 2 b r + c <= 0
    a = gain**2 - factor * (spread @ spread)
    b = mean * gain - factor * (centred.T @ spread)
    c = mean**2 - factor * (centred**2).sum(axis=0)
    if a > 0:
        root = np.sqrt(np.maximum(b**2 - a * c, 0.0))
        low, high = (b - root) / a, (b + root) / a
    return share, low, high


def shares_by_site(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float, float]]:
    """site -> (share, low, high) as shares() gives them. rows: site -> marginal, one for each sweep."""
    sites = sorted({site for row in rows for site in row})
    if not sites:
        return {}
    found = np.stack(shares(np.array([[row.get(site, 0.0) for site in sites] for row in rows])), axis=1)
    return {site: (share, low, high) for site, (share, low, high) in zip(sites, found.tolist(), strict=True)}


def sweep_marginals(
    turns: Sequence[dict[str, Any]], end: Worth | None, weighed: Container[int]
) -> list[dict[str, float]]:
    """For each measured sweep: site -> change of the model's worth by its turn, as a mean over classes.

    turns: of one round, in order, each with "site", "sweep" and "worth", that of the model before, if known.
    end: worth of the model after the last turn. weighed: sweeps to return. Turns without a known worth before
    and after them are left out.
    """
    worths = [*(turn.get("worth") for turn in turns), end]
    measured = [
        (turn, difference(after, before))
        for turn, before, after in zip(turns, worths, worths[1:], strict=False)
        if turn["sweep"] in weighed and before is not None and after is not None
    ]
    return [
        {turn["site"]: balanced(change) for turn, change in sweep}
        for _, sweep in groupby(measured, key=lambda found: found[0]["sweep"])
    ]
