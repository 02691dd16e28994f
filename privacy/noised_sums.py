"""One Gaussian release of a task's sums: how much one sample moves them, and the noise that hides it.

A sample's features phi have length 1 at most. Added or removed, it changes the upper triangle of the sum of
phi phi^T (off-diagonal values counted sqrt 2, because they stand twice in the matrix), one class's sum of
phi, and that class's count, by 1 at most each: by sqrt 3 together. Noise of the standard deviation multiplier
x sqrt 3 is therefore added to the diagonal, the sums and the counts, and 1/sqrt 2 of it above the diagonal.

The noise is discrete Gaussian on a grid of 2^-16. Sums of features lie on it already; products do on a finer
one, and are rounded to it first, which can move each by one step more: for that the sensitivity is larger by
D steps in the first of the three.
"""

import math

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import PrivacyError
from perennial.privacy.discrete_gaussian import LARGEST_STD, WordSource, discrete_gaussian

STEPS = 1 << 16
"""Of noise, in 1."""


def sensitivity(width: int) -> float:
    """L2 change of (gram, sums, counts) of so many features when one sample is added or removed."""
    return math.sqrt((1 + width / STEPS) ** 2 + 2)


def noise_std(multiplier: float, width: int) -> float:
    """Standard deviation on the diagonal, on sums and on counts; 1/sqrt 2 of it above the diagonal."""
    return multiplier * sensitivity(width)


def add_noise_to_sums(
    gram: Tensor, sums: Tensor, counts: Tensor, product_steps: int, multiplier: float, source: WordSource
) -> tuple[Tensor, Tensor, Tensor]:
    """(gram, sums, counts) as they may leave: all int64, gram in its own steps, sums and counts in 2^-16.

    gram: (D (D + 1) / 2,) int64, an upper triangle row by row in steps of 1 / product_steps. sums: (C, D)
    int64 in steps of 2^-16. counts: (C,) int64. Raises PrivacyError where the noise is larger than the
    sampler goes.
    """
    width = sums.shape[1]
    std = math.ceil(noise_std(multiplier, width) * STEPS)
    if not 1 <= std <= LARGEST_STD:
        raise PrivacyError(
            f"privacy.noise_multiplier: found {multiplier}, allowed above 0 and up to "
            f"{LARGEST_STD / STEPS / sensitivity(width):.0f} on sums of features"
        )
    coarse = product_steps // STEPS
    rounded = torch.div(gram, coarse, rounding_mode="floor")
    above = math.ceil(noise_std(multiplier, width) / math.sqrt(2) * STEPS)
    noise = discrete_gaussian(len(gram), above, source)
    rows = np.arange(width)
    diagonal = rows * width - rows * (rows - 1) // 2
    noise[diagonal] = discrete_gaussian(width, std, source)
    of_sums = discrete_gaussian(sums.numel() + counts.numel(), std, source)
    return (
        (rounded + torch.from_numpy(noise)) * coarse,
        sums + torch.from_numpy(of_sums[: sums.numel()]).view(sums.shape),
        counts * STEPS + torch.from_numpy(of_sums[sums.numel() :]),
    )
