"""Noise that sites share: each adds a part of it, and the sum of m honest parts hides one site.

A part is a discrete Gaussian of s grid steps, a step being sigma C / (sqrt(m) s): variance sigma^2 C^2 / m.
Values are rounded towards zero, so that no norm grows. privacy/shared_noise_cost.py says what the sum costs.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from perennial.foundation.errors import PrivacyError
from perennial.privacy.clipping import AdaptiveClipping
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.discrete_gaussian import LARGEST_STD, discrete_gaussian
from perennial.privacy.noise import Noise
from perennial.privacy.secure.masks import Words
from perennial.privacy.shared_noise_cost import LEAST_STD

UNIT = 1 << 10
"""Steps of the count of adaptive clipping by which a site within the clip norm is above the middle.

A site beyond the clip norm is as many steps below it.
"""


@dataclass(frozen=True)
class SharedNoise:
    """One site's share of the noise on a sum of updates.

    multiplier: sigma of the update. clip_norm: C. honest: m. std: s, in grid steps. count_multiplier: of the
    noise on adaptive clipping's count, 0 without one.
    """

    multiplier: float
    clip_norm: float
    honest: int
    std: int
    count_multiplier: float

    @classmethod
    def of(
        cls, privacy: PrivacyConfig, clip_norm: float | None, *, sites: int, honest: int, bits: int
    ) -> Self:
        """The noise of one round of mode client_shared.

        clip_norm: of this round, None: the experiment's. sites: values in the sum at most. honest: m. bits:
        of a word. Raises PrivacyError when no scale keeps the sum in range.
        """
        assert privacy.noise_multiplier is not None and privacy.clip_norm is not None
        bound = clip_norm or privacy.clip_norm
        multiplier, count = privacy.noise_multiplier, 0.0
        if privacy.adaptive_clipping is not None:
            adaptive = AdaptiveClipping(privacy.adaptive_clipping, multiplier, bound)
            multiplier, count = adaptive.update_noise_multiplier, adaptive.settings.count_noise_multiplier
        return cls(multiplier, bound, honest, scale(multiplier, sites, honest, bits), count)

    @property
    def step(self) -> float:
        """Size of one grid step in units of the update."""
        return self.multiplier * self.clip_norm / (math.sqrt(self.honest) * self.std)

    @property
    def count_std(self) -> int:
        """Standard deviation of one site's noise on the count, in steps; a site counts UNIT steps."""
        return math.ceil(2 * UNIT * self.count_multiplier / math.sqrt(self.honest))

    def add(self, words: Words, source: Noise, *, counts_within: bool) -> None:
        """Add this site's share of the noise to words, in place.

        words: (P + 1 or 2,) uint64 or uint32: P values, the weight, which is equal at every site and gets no
        noise, and with counts_within a word for adaptive clipping.
        """
        beside = 1 + counts_within
        values = words[: len(words) - beside]
        for start in range(0, len(values), 1 << 18):
            piece = values[start : start + (1 << 18)]
            np.add(piece, discrete_gaussian(len(piece), self.std, source).astype(words.dtype), out=piece)
        if counts_within:
            last = words[-1:]
            np.add(last, discrete_gaussian(1, self.count_std, source).astype(words.dtype), out=last)


def scale(multiplier: float, sites: int, honest: int, bits: int) -> int:
    """The largest scale s at which a sum with noise fits into its words.

    It is the largest power of two with n s sqrt(m) / sigma + 8 s sqrt(n) below half the range of words of so
    many bits, for n sites, m honest ones and sigma, the multiplier.
    Raises PrivacyError when the values would not fit, or s is too small for the sum to be near a Gaussian.
    """
    if not multiplier > 0 or honest < 1:
        raise PrivacyError(
            f"client_shared: noise_multiplier {multiplier} shared by {honest} honest sites; both must be "
            "above 0 (secure.quorum less secure.assumed_colluders are honest)"
        )
    per_step = sites * math.sqrt(honest) / multiplier + 8 * math.sqrt(sites)
    largest = min(LARGEST_STD, 2.0 ** (bits - 1) / per_step)
    std = 1 << max(0, math.frexp(largest)[1] - 1)
    if std * per_step >= 2.0 ** (bits - 1) or std < LEAST_STD:
        raise PrivacyError(
            f"client_shared: a sum of {sites} sites does not fit {bits}-bit words; use sums.bits 64"
        )
    return std
