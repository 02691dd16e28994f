"""Who shares masks with whom: everybody up to 100 sites, a random k-regular graph beyond.

Bell et al. 2020 (eprint 2020/704): sites in a random order on a circle, each joined to the k / 2 nearest on
both sides. The order follows from a hash of the run, the attempt and the sites' keys, so that every site
computes the same one.
"""

from dataclasses import dataclass
from hashlib import sha256

from perennial.privacy.secure.keys import joined
from perennial.privacy.secure.parameters import Parameters

COMPLETE_UP_TO = 100
LEAST_DEGREE = 20


@dataclass(frozen=True)
class Graph:
    """The neighbours of each of n sites, by position.

    order: positions round the circle. degree: neighbours of each site. parameters: of a neighbourhood, the
    site itself included.
    """

    order: tuple[int, ...]
    degree: int
    parameters: Parameters

    @classmethod
    def of(cls, sites: int, parameters: Parameters, seed: bytes) -> "Graph":
        """The graph of so many sites. parameters: of the roster. seed: names attempt and sites."""
        if sites <= COMPLETE_UP_TO:
            return cls(tuple(range(sites)), sites - 1, parameters)
        degree = regular(sites, parameters.colluders, parameters.survivors_needed(sites))
        order = sorted(range(sites), key=lambda site: sha256(joined(seed, site)).digest())
        return cls(tuple(order), degree, Parameters(min(parameters.colluders, degree)))

    def neighbours(self, site: int) -> list[int]:
        """Positions of the site's neighbours, ascending; the site is not among them."""
        count = len(self.order)
        if self.degree == count - 1:
            return [other for other in range(count) if other != site]
        place = self.order.index(site)
        half = self.degree // 2
        return sorted(self.order[(place + step) % count] for step in range(-half, half + 1) if step)

    def threshold(self) -> int:
        """Number of shares that open a secret, of the degree + 1 shares in a neighbourhood."""
        return self.parameters.threshold(self.degree + 1)


def regular(sites: int, colluders: int, survivors: int) -> int:
    """Degree of the smallest graph that is sound whoever the server calls silent; sites - 1 if none is.

    A server chooses who is silent, and may know where its colluders are, so all of them may lie together.
    Then in every neighbourhood a threshold must survive; and since an arc of the circle is cut off by two
    gaps of half the degree each, which together take as many sites as the degree, fewer may be silent or
    colluders than that: what is opened is then one sum over all survivors, and not one over an arc.
    """
    gone = sites - survivors
    for degree in range(LEAST_DEGREE, sites - 1, 2):
        threshold = Parameters(min(colluders, degree)).threshold(degree + 1)
        if degree + 1 - gone >= threshold and degree > colluders + gone:
            return degree
    return sites - 1
