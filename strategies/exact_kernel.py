"""The inner loop of `ExactSum`, compiled: one pass over memory where PyTorch's operations need three.

Compiling takes about a second, so only sums that are large enough to win it back import this file.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(nogil=True, boundscheck=False)
def add_steps(steps: NDArray[np.int64], values: NDArray[Any], weight: float, anchor: float) -> None:
    """steps += bits of (weight * values + anchor), element by element; both (N,) and contiguous.

    anchor: as in `ExactSum`; the addition of it rounds to the grid. Integer sums wrap.
    """
    for index in range(steps.size):
        steps[index] += np.float64(np.float64(values[index]) * weight + anchor).view(np.int64)
