"""Shapley values: what each player adds to a game, averaged over the orders in which players can join.

Players are 0 .. N-1; a game is a function from a set of players to a number. Shapley 1953; sampling with
truncation: Ghorbani and Zou 2019 (arXiv 1904.02868).
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from perennial.learning.scored import Worth, balanced, difference

Value = Callable[[frozenset[int]], float]

MOST_EXACT = 12
"""Players of an exact game: 2^12 values."""
LEAST_GAIN = 1e-3
"""What shares are of, in a run that gained less."""
BATCH = 10
"""Orders between looks at the stop rule."""


def exact(players: int, value: Value) -> np.ndarray:
    """(N,) float64: phi_i = sum over S without i of |S|! (N-|S|-1)! / N! * (v(S+i) - v(S)).

    Raises ValueError for more than 12 players or none.
    """
    if not 1 <= players <= MOST_EXACT:
        raise ValueError(f"exact Shapley values: found {players} players, allowed 1 to {MOST_EXACT}")
    sets = np.arange(2**players)
    member = (sets[:, None] >> np.arange(players)) & 1
    values = np.array([value(frozenset(np.flatnonzero(row).tolist())) for row in member])
    size = member.sum(axis=1)
    fact = [math.factorial(n) for n in range(players + 1)]
    weight = np.array([fact[s] * fact[max(players - s - 1, 0)] / fact[players] for s in range(players + 1)])
    phi = np.empty(players)
    for player in range(players):
        without = sets[member[:, player] == 0]
        phi[player] = weight[size[without]] @ (values[without | (1 << player)] - values[without])
    return phi


def over_permutations(
    players: int, value: Value, permutations: Iterable[np.ndarray], truncation: float = 0.0, stop: float = 0.0
) -> np.ndarray:
    """(N,) mean marginal of each player over permutations of the players.

    truncation: an order is left off, its other players at 0, once |v(all) - v(those before)| is below it.
    stop: relative change of the values over the last 10 permutations below which no more are drawn.
    Raises ValueError for an order that is no permutation, and when there is none.
    """
    known = cache(value)
    everybody = known(frozenset(range(players)))
    total, count = np.zeros(players), 0
    earlier: np.ndarray | None = None
    for order in permutations:
        if sorted(order.tolist()) != list(range(players)):
            raise ValueError(f"an order of {players} players: found {order.tolist()}, no permutation")
        before, members = known(frozenset()), frozenset[int]()
        for player in order.tolist():
            if truncation and abs(everybody - before) < truncation:
                break
            members |= {player}
            after = known(members)
            total[player] += after - before
            before = after
        count += 1
        if stop and count % BATCH == 0:
            now = total / count
            if earlier is not None and np.linalg.norm(now - earlier) < stop * np.linalg.norm(now):
                break
            earlier = now
    if not count:
        raise ValueError("Shapley values: found no permutation, allowed 1 and more")
    return total / count


@dataclass(frozen=True)
class Sampling:
    """The choice between all coalitions and drawn orders, for a game of any number of players.

    All coalitions are taken where they are fewer than those that orders would ask for. cheap: values cost
    little, so that they are taken up to 12 players.
    """

    cheap: bool

    def takes_all(self, players: int) -> bool:
        """Whether all coalitions are valued, and not sampled orders."""
        fewer = 2**players <= players * self._orders(players)
        return players <= MOST_EXACT and (self.cheap or fewer)

    def coalitions(self, players: int) -> int:
        """The largest number of coalitions whose value a game asks for."""
        return 2**players if self.takes_all(players) else players * self._orders(players)

    def values(self, players: int, value: Value, generator: np.random.Generator) -> np.ndarray:
        """(N,) Shapley value of each player. generator: draws the orders. Raises ValueError for none."""
        if self.takes_all(players):
            return exact(players, value)
        drawn = (generator.permutation(players) for _ in range(self._orders(players)))
        return over_permutations(players, value, drawn, truncation=1e-3, stop=0.05)

    def _orders(self, players: int) -> int:
        return max(30, 3 * players)


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


def over_judges(values: Sequence[float]) -> tuple[float | None, float, float | None]:
    """(low, mean, high) of several judges' values, with Student's 95 % interval; None for one judge."""
    from scipy.special import stdtrit  # by use, as above

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return None, mean, None
    half = float(stdtrit(count - 1.0, 0.975)) * float(np.std(values, ddof=1)) / count**0.5
    return mean - half, mean, mean + half


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
