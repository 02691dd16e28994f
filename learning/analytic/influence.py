"""How much one site's records count where a share of all is the most that any may have.

Shapes: K sites.
"""

from collections.abc import Mapping, Sequence

PARTS = 1024
"""A site's records count in whole parts of so many, so that scaled sums stay exact."""


def parts_by_share(counts: Sequence[int], share: float) -> list[int]:
    """(K,) parts of PARTS by which each site's sums count, so that none has more than `share` of all.

    With n falling, the level is tau = s sum_{i>m} n_i / (1 - m s) for the least m < 1/s with n_{m+1} <= tau,
    and a site's part is floor(PARTS min(1, tau / n)), and 1 at least: nobody is cut to nothing.
    Everybody counts whole where no level does it: fewer than 1/s sites have records.
    """
    falling = sorted((n for n in counts if n > 0), reverse=True)
    above = 0
    while above * share < 1 and above < len(falling):
        level = share * sum(falling[above:]) / (1 - above * share)
        if falling[above] <= level:
            return [PARTS if n <= level else max(1, int(PARTS * level / n)) for n in counts]
        above += 1
    return [PARTS] * len(counts)


def parts_by_registration(counts: Mapping[str, int], registered: Mapping[str, int]) -> dict[str, int]:
    """site -> parts of PARTS by which it counts as no more records than it registered with."""
    return {
        site: PARTS if (most := registered.get(site)) is None or n <= most else max(1, PARTS * most // n)
        for site, n in counts.items()
    }
