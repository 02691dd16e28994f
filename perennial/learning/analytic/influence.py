"""How much a site's records count, and what a table's column is worth.

Shapes: K sites.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from perennial.learning.analytic.solve import Sums

PARTS = 1024
"""A site's records count in whole parts of so many, so that scaled sums stay exact."""


def level(counts: Sequence[int], share: float) -> float:
    """The count to which larger sites are cut, so that none of the K has more than `share` of all.

    With n falling, it is s sum_{i>m} n_i / (1 - m s) for the least m < 1/s with n_{m+1} at most that.
    Infinite if no such count exists: fewer than 1/s sites have records.
    """
    falling = sorted((n for n in counts if n > 0), reverse=True)
    above = 0
    while above * share < 1 and above < len(falling):
        found = share * sum(falling[above:]) / (1 - above * share)
        if falling[above] <= found:
            return found
        above += 1
    return math.inf


def parts_by_share(counts: Sequence[int], share: float) -> list[int]:
    """(K,) weights of the sites' sums in units of 1/PARTS: floor(PARTS level / n), from 1 to PARTS."""
    most = level(counts, share)
    return [PARTS if n <= most else max(1, int(PARTS * most / n)) for n in counts]


def parts_by_registration(counts: Mapping[str, int], registered: Mapping[str, int]) -> dict[str, int]:
    """site -> weight of its sums in units of 1/PARTS: it counts as no more records than it registered."""
    return {
        site: PARTS if (most := registered.get(site)) is None or n <= most else max(1, PARTS * most // n)
        for site, n in counts.items()
    }


MOST_COLUMNS = 60
"""Columns of a table up to which each is left out once: one solution each."""
SHRINKAGES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


def worth_of_columns(sums: "Sums", columns: Mapping[str, range]) -> dict[str, float | None]:
    """ "" and each column -> the share of the classes' variance that ridge explains with all, and without it.

    By generalised cross-validation, from the sums alone. Nothing for more than MOST_COLUMNS. columns: name
    -> its places among the features. Raises DataError where the sums have no ridge solution.
    """
    if not 1 < len(columns) <= MOST_COLUMNS or sums.total <= 0:
        return {}
    from perennial.learning.analytic.solve import best_by_gcv, gcv

    variance = 1 - float((sums.counts / sums.total).square().sum())
    every = torch.cat([torch.tensor([*places]) for places in columns.values()])
    whole = sums.of_features(every)
    shrinkage = best_by_gcv(whole, SHRINKAGES, standardise=True)

    def explained(of: "Sums") -> float | None:
        share = 1 - gcv(of, [shrinkage], standardise=True)[0] / variance if variance > 0 else math.nan
        return round(max(0.0, share), 4) if math.isfinite(share) else None

    found = {"": explained(whole)}
    for name, places in columns.items():
        left = every[(every < places.start) | (every >= places.stop)]
        found[name] = explained(sums.of_features(left))
    return found


def auroc_of_explained(share: float, positive: float) -> float:
    """The AUROC of two classes whose scores are normal, of which `share` of the variance is explained.

    positive: the share of the records that are of one class. Fisher's discriminant and ridge order alike.
    """
    apart = share / ((1 - min(share, 1 - 1e-9)) * positive * (1 - positive))
    return NormalDist().cdf(math.sqrt(apart / 2))
