"""Whose update points elsewhere than the updates of all the others, in a round in which the others agree.

If sites hold alike data, their updates point in much the same direction, and the update of a site that plants
a backdoor does not, however long it is. If data differ, honest updates differ as well; then there is no gap
between the two, and nobody is left out.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from perennial.strategies.sums.parameters import is_statistic
from perennial.strategies.sums.update_file import Piece

FEWEST = 5
"""Sites of a round of which it can be said that most agree and one does not."""
MOST = 64
"""In a round of more sites nobody is compared: that would keep all of their updates on the server's disk."""
APART = 0.45
"""A site whose agreement is below this part of the others' median points elsewhere.

With even shares, on seeds 11 and 12 of robust_digits and 11 of robust_ham10000, a backdoor had at most
0.38 of it in the first round, and an honest one no less than 0.75."""
BACK = 0.6
"""A site that was left out counts again with so much of the others' median, once they agree."""


@dataclass(frozen=True)
class Compared:
    """Who is left out of a round, and how far each site agreed with the others, from -1 to 1."""

    left_out: frozenset[str]
    agreement: Mapping[str, float]


def cosines(pieces: Iterable[Piece], sites: int) -> Tensor:
    """(n, n) float64 cosines between the updates' parameters; 0 with an update of zero.

    Infinite lengths do not occur: the gate refuses them.
    """
    products = torch.zeros(sites, sites, dtype=torch.float64)
    for piece in pieces:
        if not is_statistic(piece.name):
            products += piece.rows @ piece.rows.T
    lengths = products.diagonal().sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, torch.zeros_like(lengths))
    return products * inverse[:, None] * inverse[None, :]


def compared(similar: Tensor, sites: Collection[str], suspected: Collection[str], least: float) -> Compared:
    """Who is left out of this round.

    A site's agreement is the cosine of its update and the sum of the other ones', each at length 1, so that
    nobody's length counts. Sites are left out when every other site has an agreement of `least` or more, they
    have less than APART of the others' median, and they are fewer than half: a site in between means that
    data differ, and then nobody is accused. A suspected site, one left out of the round before, is compared
    with the sites that are not, and stays out until it agrees with them in a round in which their own median
    is `least` or more: from late rounds, whose updates are little but noise, nothing follows.

    similar: (n, n) of cosines, in the order of sites.
    """
    names = list(sites)
    trusted = [index for index, name in enumerate(names) if name not in suspected]
    if len(trusted) < FEWEST - 1:
        return Compared(frozenset(), {})
    agreement = dict(zip(names, _agreements(similar, trusted), strict=True))
    own = {names[index]: agreement[names[index]] for index in trusted}
    agreeing = [value for value in own.values() if value >= least]
    out: set[str] = set()
    if len(agreeing) >= FEWEST - 1:
        usual = median(agreeing)
        strange = {name for name, value in own.items() if value < APART * usual}
        if len(agreeing) + len(strange) == len(own) and 2 * len(strange) < len(names):
            out |= strange
    rest = [value for name, value in own.items() if name not in out]
    if rest:
        usual = median(rest)
        out |= {name for name in suspected if usual < least or agreement.get(name, 1.0) < BACK * usual}
    return Compared(frozenset(out & set(names)), agreement)


def _agreements(similar: Tensor, among: Collection[int]) -> list[float]:
    """Cosine of each update and the sum of the others among these, all at length 1; 0 where that sum is 0."""
    is_among = torch.zeros(len(similar), dtype=similar.dtype)
    is_among[list(among)] = 1.0
    with_all = similar @ is_among
    own = similar.diagonal() * is_among
    with_others = with_all - own
    squares = is_among @ with_all - 2 * is_among * with_others - own
    lengths = squares.clamp(min=0.0).sqrt()
    # below that only rounding is left of updates that cancel each other
    return torch.where(lengths > 1e-6, with_others / lengths, torch.zeros_like(lengths)).tolist()
