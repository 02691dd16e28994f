"""A lower bound on epsilon from one run: many independent canaries, each in or out by the toss of a coin.

The attacker sees the release and guesses, for the clearest canaries, whether they were in. Under (epsilon,
delta) a guess is right with probability at most e^epsilon / (1 + e^epsilon), whatever the other canaries did,
except in a share of runs that delta bounds. So many right guesses bound epsilon from below.

Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846), theorem 5.2 and appendix D.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OneRunAudit:
    """epsilon_floor holds with `confidence` at delta; `right` of `guesses` on `canaries` were right.

    refutable: the floor if all guesses were right; no claim above it can be refuted by so many.
    """

    epsilon_floor: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int
    refutable: float


def one_run_audit(
    scores: np.ndarray, present: np.ndarray, delta: float, confidence: float = 0.95, share: float = 0.5
) -> OneRunAudit:
    """The largest epsilon that the guesses rule out.

    scores: (m,) of the canaries, higher where the release speaks for presence. present: (m,) bool, fair coins
    that are independent. share: of the canaries that are guessed, the highest half of them as present, the
    lowest as absent; it must not be chosen by the scores.
    Raises ValueError on fewer than 10 canaries.
    """
    count = len(scores)
    if count < 10:
        raise ValueError("an audit in one run needs at least 10 canaries")
    each = max(1, int(share * count / 2))
    order = np.argsort(scores, kind="stable")
    right = int(present[order[-each:]].sum() + (~present[order[:each]]).sum())
    floor, most = (
        _largest_refuted(count, 2 * each, number, delta, 1 - confidence) for number in (right, 2 * each)
    )
    return OneRunAudit(floor, delta, confidence, count, 2 * each, right, most)


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of so many right guesses under (epsilon, delta)."""
    from scipy.stats import binom

    rate = 1 / (1 + np.exp(-epsilon))
    below = np.cumsum(binom.pmf(right - np.arange(1, right + 1), guesses, rate))
    excess = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, rate)) + 2 * canaries * delta * excess)


def _largest_refuted(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """By bisection; 0 where not even 0 is refuted."""
    low, high = 0.0, 60.0
    if chance(canaries, guesses, right, low, delta) >= error:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        refuted = chance(canaries, guesses, right, middle, delta) < error
        low, high = (middle, high) if refuted else (low, middle)
    return low
