"""The compiled loops of `ExactSum` for large models: one pass over memory where PyTorch needs three.

Compiling takes about a second, so only sums that are large enough to win it back import this file. On disk
numba would keep what it compiled as pickles, so each process compiles anew. The sum runs on several threads;
each element belongs to one thread, so their number changes no bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from perennial.strategies.sums.threads import deal, on_threads

PIECE = 1 << 20

Share = list[tuple[int, int, int]]
"""(row, start, stop) of the pieces that one thread adds."""


@njit(nogil=True, boundscheck=False)
def add_steps(steps: NDArray[np.int64], values: NDArray[Any], weight: float, anchor: float) -> None:
    """steps += bits of (weight * values + anchor), element by element; both (N,) and contiguous.

    anchor: as in `ExactSum`; the addition of it rounds to the grid. Integer sums wrap.
    """
    for index in range(steps.size):
        steps[index] += np.float64(np.float64(values[index]) * weight + anchor).view(np.int64)


@njit(nogil=True, boundscheck=False)
def add_mean(
    reference: NDArray[Any], steps: NDArray[np.int64], offset: int, scale: float, out: NDArray[Any]
) -> None:
    """out = reference + (steps - offset) * scale, computed in float64; all (N,) and contiguous."""
    for index in range(steps.size):
        out[index] = reference[index] + np.float64(steps[index] - offset) * scale


def shares(lengths: Sequence[int]) -> list[Share]:
    """Rows of these lengths in pieces, dealt out to as many threads as there are cores."""
    pieces = [
        (row, start, min(start + PIECE, length))
        for row, length in enumerate(lengths)
        for start in range(0, length, PIECE)
    ]
    return deal(pieces, lambda piece: piece[2] - piece[1])


def add_rows(
    steps: Sequence[NDArray[np.int64]],
    values: Sequence[NDArray[Any]],
    weight: float,
    anchor: float,
    dealt: Sequence[Share],
) -> None:
    """add_steps of each row, by the threads that dealt names."""

    def add(share: Share) -> None:
        for row, start, stop in share:
            add_steps(steps[row][start:stop], values[row][start:stop], weight, anchor)

    on_threads("exact-sum", add, dealt)
