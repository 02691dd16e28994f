"""The compiled loops of `ExactSum`: one pass over memory where NumPy needs three. See exact_loops.py."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from perennial.strategies.sums.exact_loops import Loops


@njit(nogil=True, boundscheck=False)
def add_steps(steps: NDArray[np.int64], values: NDArray[Any], weight: float, anchor: float) -> None:
    """See Loops."""
    for index in range(steps.size):
        steps[index] += np.float64(np.float64(values[index]) * weight + anchor).view(np.int64)


@njit(nogil=True, boundscheck=False)
def add_mean(
    reference: NDArray[Any], steps: NDArray[np.int64], offset: int, scale: float, out: NDArray[Any]
) -> None:
    """See Loops."""
    for index in range(steps.size):
        out[index] = reference[index] + np.float64(steps[index] - offset) * scale


class CompiledLoops:
    """`Loops` of this module, compiled for the arrays of messages and models."""

    add_steps = staticmethod(add_steps)
    add_mean = staticmethod(add_mean)


def compiled_loops() -> Loops:
    """The loops, compiled now: for arrays that own their memory, and for those that lie in a message."""
    steps, out = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
    for writeable in (True, False):
        values = np.zeros(1, dtype=np.float32)
        values.flags.writeable = writeable
        add_steps(steps, values, 1.0, 0.0)
        add_mean(values, steps, 0, 1.0, out)
    return CompiledLoops()
