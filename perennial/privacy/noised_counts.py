"""Counts of right and wrong answers under noise: what one unit moves them by, and what hides that.

The right and the wrong answers of M classes are 2 M cells. A held-out sample is in one of them, so that
adding or removing it moves one cell by 1; of a patient one held-out sample is counted, so that the same
holds. What a whole site tells is shrunk to an L2 norm of `norm` and rounded towards zero, so that it moves a
sum by no more.

The noise is discrete Gaussian on a grid of 2^-10 of a sample, whose standard deviation has hundreds of steps:
the cost is that of a Gaussian. Rounding to whole samples comes afterwards, and so does all that is done with
the counts, such as keeping back those that look small.

Canonne, Kamath and Steinke 2020 (arXiv 2004.00010).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from perennial.foundation.errors import PrivacyError
from perennial.privacy.discrete_gaussian import LARGEST_STD, Integers, draw_discrete_gaussian
from perennial.privacy.shared_noise_cost import LEAST_STD

if TYPE_CHECKING:
    from perennial.privacy.noise import Noise

STEPS = 1 << 10
"""Of the grid, in one sample."""
_BELOW = 1 - 2.0**-40
"""Against rounding of a quotient in float64, which could lift a norm above its bound."""


@dataclass(frozen=True)
class CountNoise:
    """The noise on counts of right answers.

    multiplier: standard deviation over norm.
    norm: L2 change of the cells by one unit, in samples.
    """

    multiplier: float
    norm: float = 1.0

    @property
    def std(self) -> float:
        """Standard deviation on each cell, in samples."""
        return self.multiplier * self.norm

    def check(self) -> None:
        """Raises ValueError when the sampler cannot draw noise of this size."""
        if not LEAST_STD <= self._steps <= LARGEST_STD:
            least, most = (bound / STEPS / self.norm for bound in (LEAST_STD, LARGEST_STD))
            raise ValueError(
                f"evaluation.noise_multiplier: found {self.multiplier:g}, allowed {least:g} to {most:g} with "
                f"counts of norm {self.norm:g}"
            )

    def draw(self, cells: int, source: "Noise") -> Integers:
        """(cells,) int64 samples of the whole noise, in grid steps."""
        return draw_discrete_gaussian(cells, self._steps, source)

    def share(self, cells: int, honest: int, source: "Noise") -> Integers:
        """(cells,) int64 samples of one site's share of the noise, in grid steps.

        honest: number of shares whose sum has the whole variance. Raises PrivacyError when a share is too
        narrow for their sum to be near a Gaussian.
        """
        std = math.ceil(self._steps / math.sqrt(honest))
        if std < LEAST_STD:
            raise PrivacyError(
                f"evaluation.noise_multiplier: noise of {self.std:g} samples shared by {honest} sites is too "
                "little for the grid of the counts; raise it or evaluation.clip_counts"
            )
        return draw_discrete_gaussian(cells, std, source)

    def shrink(self, cells: Integers) -> Integers:
        """Cells (2 M,), in samples, cut to L2 norm `norm` and rounded down: int64 in grid steps."""
        length = float(np.linalg.norm(cells.astype(np.float64)))
        scale = STEPS * (1.0 if length <= self.norm else self.norm / length * _BELOW)
        return np.floor(cells * scale).astype(np.int64)

    def within(self, right: Sequence[int], samples: Sequence[int]) -> bool:
        """Whether right and wrong answers, in whole samples, have an L2 norm of `norm` at most."""
        squares = sum(r * r + (n - r) * (n - r) for r, n in zip(right, samples, strict=True))
        return squares <= self.norm**2

    @property
    def _steps(self) -> int:
        return math.ceil(self.std * STEPS)


def join_cells(right: Sequence[int], samples: Sequence[int]) -> Integers:
    """(2 M,) int64: right answers of each class, then wrong ones."""
    return np.array([*right, *(n - r for r, n in zip(right, samples, strict=True))], dtype=np.int64)


def round_to_samples(cells: Integers) -> tuple[list[int], list[int]]:
    """(right answers, samples) of each class from cells (2 M,) in grid steps, rounded to whole samples.

    Noise can make them negative.
    """
    right, wrong = np.split((cells + STEPS // 2) // STEPS, 2)
    return right.tolist(), (right + wrong).tolist()


def round_towards_zero(cells: Integers) -> tuple[list[int], list[int]]:
    """(right answers, samples) of each class from cells (2 M,) without noise, rounded down."""
    right, wrong = np.split(cells // STEPS, 2)
    return right.tolist(), (right + wrong).tolist()
