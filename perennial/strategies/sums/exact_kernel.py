"""The compiled loops of `ExactSum`: one pass over memory where NumPy needs three. See exact_loops.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(nogil=True, boundscheck=False)
def add_steps(steps: NDArray[np.int64], values: NDArray[Any], weight: float, anchor: float) -> None:
    """Add one row as Loops.add_steps in exact_loops.py does."""
    for index in range(steps.size):
        steps[index] += np.float64(np.float64(values[index]) * weight + anchor).view(np.int64)


@njit(nogil=True, boundscheck=False)
def add_four(
    steps: NDArray[np.int64],
    first: NDArray[Any],
    second: NDArray[Any],
    third: NDArray[Any],
    fourth: NDArray[Any],
    weights: tuple[float, float, float, float],
    anchor: float,
) -> None:
    """Add four rows as add_steps does, in one pass over the sum."""
    for index in range(steps.size):
        steps[index] += (
            np.float64(np.float64(first[index]) * weights[0] + anchor).view(np.int64)
            + np.float64(np.float64(second[index]) * weights[1] + anchor).view(np.int64)
            + np.float64(np.float64(third[index]) * weights[2] + anchor).view(np.int64)
            + np.float64(np.float64(fourth[index]) * weights[3] + anchor).view(np.int64)
        )


@njit(nogil=True, boundscheck=False)
def add_mean(
    reference: NDArray[Any], steps: NDArray[np.int64], offset: int, scale: float, out: NDArray[Any]
) -> None:
    """Compute Loops.add_mean of exact_loops.py."""
    for index in range(steps.size):
        out[index] = reference[index] + np.float64(steps[index] - offset) * scale


class CompiledLoops:
    """The `Loops` of exact_loops.py, compiled for the arrays of messages and models."""

    add_mean = staticmethod(add_mean)

    def add_steps(
        self,
        steps: NDArray[np.int64],
        values: Sequence[NDArray[Any]],
        weights: Sequence[float],
        anchor: float,
    ) -> None:
        fours = len(values) // 4 * 4
        for first in range(0, fours, 4):
            a, b, c, d = values[first : first + 4]
            w, x, y, z = weights[first : first + 4]
            add_four(steps, a, b, c, d, (w, x, y, z), anchor)
        for row, weight in zip(values[fours:], weights[fours:], strict=True):
            add_steps(steps, row, weight, anchor)


def compiled_loops() -> CompiledLoops:
    """Compile the loops, for arrays that PyTorch hands out."""
    steps, out = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
    values = np.zeros(1, dtype=np.float32)
    add_steps(steps, values, 1.0, 0.0)
    add_four(steps, values, values, values, values, (1.0, 1.0, 1.0, 1.0), 0.0)
    add_mean(values, steps, 0, 1.0, out)
    return CompiledLoops()
