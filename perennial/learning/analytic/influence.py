"""Limits how much a site's records count, so that no site has more than a given share of all.

Shapes: K sites.
"""

import math
from collections.abc import Mapping, Sequence

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
