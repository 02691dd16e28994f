"""Exact samples of the discrete Gaussian, in integers alone.

P(x) is proportional to exp(-x^2 / (2 std^2)) over all integers x. No floating-point number takes part, so
neither the low bits of a sample nor the tail betray anything that the distribution does not say. Randomness
comes from privacy/noise.py.

Canonne, Kamath and Steinke 2020 (arXiv 2004.00010), algorithms 1 to 3, with the discrete Laplace of scale
std, for which every intermediate number fits 64 bits.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from perennial.privacy.noise import Noise

LARGEST_STD = 1 << 24
_CHUNK = 1 << 15
_KEPT = 0.45
"""Less than the share of proposals that are kept: (1 - 1/e) exp(-1/2) sqrt(pi / 2) = 0.48 for a large std."""
Integers = NDArray[np.int64]


def draw_discrete_gaussian(count: int, std: int, source: "Noise") -> Integers:
    """(count,) int64, independent samples. Raises ValueError when std is outside 1 to 2^24."""
    if not 1 <= std <= LARGEST_STD:
        raise ValueError(f"std: found {std}, allowed integers from 1 to {LARGEST_STD}")
    result = np.empty(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        piece = result[start : start + _CHUNK]
        filled = 0
        while filled < len(piece):
            found = _draw_accepted(int((len(piece) - filled) / _KEPT) + 16, std, source)
            found = found[: len(piece) - filled]
            piece[filled : filled + len(found)] = found
            filled += len(found)
    return result


def _draw_accepted(proposals: int, std: int, source: "Noise") -> Integers:
    """Those of so many proposals that are kept: discrete Laplace of scale std, thinned to a Gaussian."""
    size = _draw_laplace(proposals, std, source)
    # exp(-(|x| - std)^2 / (2 std^2)), since the variance over the scale is std again
    distance = np.abs(size) - std
    return size[_draw_bernoulli_exp(distance * distance, 2 * std * std, source)]


def _draw_laplace(proposals: int, scale: int, source: "Noise") -> Integers:
    """Samples with P(x) proportional to exp(-|x| / scale); some of the proposals are dropped."""
    rest = _draw_below(scale, proposals, source)
    rest = rest[_draw_bernoulli_exp(rest, scale, source)]
    # how often a coin of exp(-1) falls heads before tails
    whole = np.zeros(len(rest), dtype=np.int64)
    active = np.arange(len(rest))
    while len(active):
        active = active[_draw_bernoulli_exp(np.ones(len(active), dtype=np.int64), 1, source)]
        whole[active] += 1
    size = rest + scale * whole
    negative = (source.draw_words(len(size)) & np.uint64(1)).astype(bool)
    kept = ~(negative & (size == 0))
    return np.where(negative, -size, size)[kept]


def _draw_bernoulli_exp(above: Integers, below: int, source: "Noise") -> NDArray[np.bool_]:
    """(N,) True with probability exp(-above / below) each; above: (N,) integers from 0."""
    result = np.ones(len(above), dtype=bool)
    whole, part = np.divmod(above, below)
    left = np.flatnonzero(whole)
    remaining = whole[left]
    while len(left):
        heads = _draw_coin(np.full(len(left), below, dtype=np.int64), below, source)
        result[left[~heads]] = False
        again = heads & (remaining > 1)
        left, remaining = left[again], remaining[again] - 1
    alive = np.flatnonzero(result)
    result[alive] = _draw_coin(part[alive], below, source)
    return result


def _draw_coin(above: Integers, below: int, source: "Noise") -> NDArray[np.bool_]:
    """As _bernoulli_exp, for 0 <= above <= below.

    It is true if the number of wins in a row is even, where the k-th win has the chance above / (k below).
    """
    even = np.ones(len(above), dtype=bool)
    active = np.arange(len(above))
    turn = 1
    while len(active):
        wins = _draw_below(turn * below, len(active), source) < above[active]
        active = active[wins]
        even[active] = not even[active[0]] if len(active) else True
        turn += 1
    return even


def _draw_below(bound: int, count: int, source: "Noise") -> Integers:
    """(count,) uniform integers from 0 to bound - 1, by rejection; bound at most 2^62."""
    mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
    drawn = source.draw_words(count) & mask
    if bound & (bound - 1):
        limit = np.uint64(bound)
        out = np.flatnonzero(drawn >= limit)
        drawn = drawn.copy()
        while len(out):
            drawn[out] = source.draw_words(len(out)) & mask
            out = out[drawn[out] >= limit]
    return drawn.astype(np.int64)
