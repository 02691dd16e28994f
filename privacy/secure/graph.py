"""Who shares masks with whom: everybody up to 100 sites, a random k-regular graph beyond.

Bell et al. 2020 (eprint 2020/704): sites in a random order on a circle, each joined to the k / 2 nearest on
both sides. The order follows from a hash of the run, the attempt and the sites' keys, so that every site
computes the same one. A server that lies about the sites' keys can try many of them; the figures below hold
against a curious server.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from perennial.privacy.secure.keys import joined
from perennial.privacy.secure.parameters import Parameters

COMPLETE_UP_TO = 100
FAILURE = 2.0**-40
"""Probability that any neighbourhood of an attempt holds too many colluders, or too few survivors."""


@dataclass(frozen=True)
class Graph:
    """The neighbours of each of n sites, by position.

    order: positions round the circle. degree: neighbours of each site. parameters: of a neighbourhood, the
    site itself included. failure: probability that these do not hold somewhere; 0 for the complete graph.
    """

    order: tuple[int, ...]
    degree: int
    parameters: Parameters
    failure: float = 0.0

    @classmethod
    def of(cls, sites: int, parameters: Parameters, seed: bytes) -> "Graph":
        """The graph of so many sites. seed: what names the attempt and its sites."""
        if sites <= COMPLETE_UP_TO:
            return cls(tuple(range(sites)), sites - 1, parameters)
        degree, colluders, failure = regular(sites, parameters.colluders, parameters.survivors_needed(sites))
        order = sorted(range(sites), key=lambda site: sha256(joined(seed, site)).digest())
        return cls(tuple(order), degree, Parameters(colluders), failure)

    def neighbours(self, site: int) -> list[int]:
        """Positions of the site's neighbours, ascending; the site is not among them."""
        count = len(self.order)
        if self.degree == count - 1:
            return [other for other in range(count) if other != site]
        place = self.order.index(site)
        half = self.degree // 2
        return sorted(self.order[(place + step) % count] for step in range(-half, half + 1) if step)

    def threshold(self) -> int:
        """Shares that open a secret, of the degree + 1 that there are."""
        return self.parameters.threshold(self.degree + 1)


@lru_cache(maxsize=64)
def regular(sites: int, colluders: int, survivors: int) -> tuple[int, int, float]:
    """(degree, colluders in a neighbourhood, failure probability) of the smallest sound regular graph.

    The failure probability is a union bound over the sites of three events: more colluders in a neighbourhood
    than assumed there, fewer survivors than its threshold, and a site whose k / 2 followers on the circle are
    all colluders or gone (without which the honest survivors are connected). Falls back to the complete graph
    when no smaller one is sound.
    """
    gone = sites - survivors
    for degree in range(20, sites - 1, 2):
        lone = sites * _more_than(degree // 2 - 1, sites - 1, min(sites - 1, colluders + gone), degree // 2)
        if lone > FAILURE / 2:
            continue
        for among in range(min(colluders, degree) + 1):
            threshold = Parameters(among).threshold(degree + 1)
            caught = sites * _more_than(among, sites - 1, colluders, degree)
            # of the neighbours (the site itself may be gone) at least threshold must survive
            starved = sites * _more_than(degree - threshold, sites - 1, min(gone, sites - 1), degree)
            if lone + caught + starved <= FAILURE:
                return degree, among, lone + caught + starved
    return sites - 1, colluders, 0.0


def _more_than(limit: int, population: int, marked: int, drawn: int) -> float:
    """P(more than `limit` of `drawn` are marked), drawn without replacement: the hypergeometric tail."""
    total = math.comb(population, drawn)
    hits = sum(
        math.comb(marked, found) * math.comb(population - marked, drawn - found)
        for found in range(max(limit + 1, 0), min(marked, drawn) + 1)
    )
    return hits / total
