"""One Gaussian release of a task's sums: how far one sample moves them, and the noise that hides it.

Noised sums are of features without the appended constant, whose products the sums and counts of classes
repeat. Take features in units of their radius, so that a sample's phi has length 1 at most. Added or removed,
it changes the sum of phi phi^T (off-diagonal values counted sqrt 2, because they stand twice in the matrix),
its class's sum of phi, and its class's count, by 1 at most each.

The three blocks are released as (a G, b S, c n) with public weights (a, b, c), under noise of one standard
deviation, and divided by their weights afterwards, which is post-processing. So the noise on G is multiplier
x sensitivity / a on its diagonal, and 1/sqrt 2 of that above it; on S it is divided by b, on n by c. a = 0
releases no products at all.

The noise is discrete Gaussian. Sums of features lie on its grid already; products are rounded towards zero to
a grid of 2^-16 radius^2 first, which moves each of D^2 by less than one step, and their matrix by D steps.

D: features. C: classes.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import BLOCKS, Blocks
from perennial.privacy.discrete_gaussian import LARGEST_STD, draw_discrete_gaussian
from perennial.privacy.noise import Noise

STEPS = 1 << 16
"""Of noise, in 1."""


def compute_sensitivity(width: int, blocks: Blocks = BLOCKS) -> float:
    """L2 change of (a G, b S, c n) when one sample is added or removed. width: D. blocks: (a, b, c)."""
    a, b, c = blocks
    return math.hypot(a * (1 + width / STEPS), b, c)


@dataclass(frozen=True)
class SumsNoise:
    """Standard deviations on the diagonal of the products, on sums and on counts, in units of the values.

    gram: 1/sqrt 2 of it above the diagonal; infinite where no products are released.
    """

    gram: float
    sums: float
    counts: float

    @classmethod
    def of(
        cls, multiplier: float, width: int, blocks: Blocks = BLOCKS, radius_squared: float = 1.0
    ) -> "SumsNoise":
        """The noise of one release that hides adding or removing a sample.

        multiplier: standard deviation over sensitivity. width: features. radius_squared: square of the
        greatest length of a sample's features.
        """
        a, b, c = blocks
        std = multiplier * compute_sensitivity(width, blocks)
        return cls(std / a * radius_squared if a else math.inf, std / b * math.sqrt(radius_squared), std / c)

    def of_many(self, releases: int) -> "SumsNoise":
        """The noise on the sum of this many releases."""
        root = math.sqrt(releases)
        return SumsNoise(self.gram * root, self.sums * root, self.counts * root)


def add_noise_to_sums(
    gram: Tensor,
    sums: Tensor,
    counts: Tensor,
    multiplier: float,
    source: Noise,
    *,
    blocks: Blocks = BLOCKS,
    radius_squared: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gram, sums, counts) as they may leave: all int64, gram in steps of 2^-32, sums and counts in 2^-16.

    gram: (D (D + 1) / 2,) int64, an upper triangle row by row in steps of 2^-32; what is released of it is
    empty when its weight is 0. sums: (C, D) int64 in steps of 2^-16. counts: (C,) int64. radius_squared: 1 or
    1/2; every sample's features must be so short. Raises PrivacyError where the noise is larger than the
    sampler goes.
    """
    width = sums.shape[1]
    noise = SumsNoise.of(multiplier, width, blocks, radius_squared)
    coarse = round(STEPS * radius_squared)
    in_steps = [math.ceil(std * STEPS) for std in (noise.sums, noise.counts)]
    if blocks[0]:
        in_steps.append(math.ceil(noise.gram * STEPS * STEPS / coarse))
    if not (min(in_steps) >= 1 and max(in_steps) <= LARGEST_STD):
        most = multiplier * LARGEST_STD / max(in_steps) if multiplier else LARGEST_STD / STEPS
        raise PrivacyError(
            f"privacy.noise_multiplier: found {multiplier}, allowed above 0 and up to {most:.0f} on sums of "
            f"features with block weights {blocks}"
        )
    products = _add_gram_noise(gram, width, coarse, in_steps, source)
    of_sums = torch.from_numpy(draw_discrete_gaussian(sums.numel(), in_steps[0], source)).view(sums.shape)
    of_counts = torch.from_numpy(draw_discrete_gaussian(counts.numel(), in_steps[1], source))
    return products, sums + of_sums, counts * STEPS + of_counts


def _add_gram_noise(gram: Tensor, width: int, coarse: int, in_steps: list[int], source: Noise) -> Tensor:
    if len(in_steps) == 2:
        return gram[:0]
    above = math.ceil(in_steps[2] / math.sqrt(2))
    noise = draw_discrete_gaussian(len(gram), above, source)
    rows = np.arange(width)
    diagonal = rows * width - rows * (rows - 1) // 2
    noise[diagonal] = draw_discrete_gaussian(width, in_steps[2], source)
    rounded = torch.div(gram, coarse, rounding_mode="trunc")
    return (rounded + torch.from_numpy(noise)) * coarse
