"""Noise that sites share: each adds a part of it, and the sum of m honest parts hides one site.

A part is a discrete Gaussian of s grid steps, a step being sigma C / (sqrt(m) s): variance sigma^2 C^2 / m.
Values are rounded towards zero, so that no norm grows. privacy/shared_noise_cost.py says what the sum costs.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.discrete_gaussian import LARGEST_STD, draw_discrete_gaussian
from perennial.privacy.noise import Noise
from perennial.privacy.secure.keys import Words
from perennial.privacy.shared_noise_cost import LEAST_STD


@dataclass(frozen=True)
class SharedNoise:
    """One site's share of the noise on a sum of updates.

    multiplier: sigma of the update. clip_norm: C. honest: m. std: s, in grid steps.
    """

    multiplier: float
    clip_norm: float
    honest: int
    std: int

    @classmethod
    def of(cls, privacy: PrivacyConfig, *, sites: int, honest: int) -> Self:
        """The noise of one round of mode client_shared.

        sites: values in the sum at most. honest: m. Raises PrivacyError when no scale keeps the sum in range.
        """
        multiplier, bound = privacy.noise_multiplier, privacy.clip_norm
        assert multiplier is not None and bound is not None
        return cls(multiplier, bound, honest, scale(multiplier, sites, honest))

    @property
    def step(self) -> float:
        """Size of one grid step in units of the update."""
        return self.multiplier * self.clip_norm / (math.sqrt(self.honest) * self.std)

    @property
    def whole(self) -> float:
        """Standard deviation of the noise of all honest sites together, in units of the update."""
        return self.step * self.std * math.sqrt(self.honest)

    def add(self, words: Words, source: Noise) -> None:
        """Add this site's share of the noise to words, in place.

        words: (P + 1,) uint64: P values, and the weight, which is equal at every site and gets no noise.
        """
        values = words[:-1]
        for start in range(0, len(values), 1 << 18):
            piece = values[start : start + (1 << 18)]
            np.add(piece, draw_discrete_gaussian(len(piece), self.std, source).astype(words.dtype), out=piece)


def scale(multiplier: float, sites: int, honest: int) -> int:
    """The largest scale s at which a sum with noise fits into its words.

    It is the largest power of two with n s sqrt(m) / sigma + 8 s sqrt(n) below half the range of 64-bit
    words, for n sites, m honest ones and sigma, the multiplier.
    Raises PrivacyError when the values would not fit, or s is too small for the sum to be near a Gaussian.
    """
    if not multiplier > 0 or honest < 1:
        raise PrivacyError(
            f"client_shared: noise_multiplier {multiplier} shared by {honest} honest sites; both must be "
            "above 0 (secure.quorum less secure.assumed_colluders are honest)"
        )
    per_step = sites * math.sqrt(honest) / multiplier + 8 * math.sqrt(sites)
    largest = min(LARGEST_STD, 2.0**63 / per_step)
    std = 1 << max(0, math.frexp(largest)[1] - 1)
    if std * per_step >= 2.0**63 or std < LEAST_STD:
        raise PrivacyError(
            f"client_shared: a sum of {sites} sites with noise_multiplier {multiplier:g} does not fit 64-bit "
            "words, or its noise their grid"
        )
    return std
