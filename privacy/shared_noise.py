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
from perennial.privacy.discrete_gaussian import LARGEST_STD, WordSource, discrete_gaussian
from perennial.privacy.secure.masks import Words
from perennial.privacy.shared_noise_cost import LEAST_STD


@dataclass(frozen=True)
class SharedNoise:
    """One site's part. multiplier: sigma of the update. clip_norm: C. honest: m. std: s, in steps."""

    multiplier: float
    clip_norm: float
    honest: int
    std: int

    @classmethod
    def of(cls, privacy: PrivacyConfig, *, sites: int, honest: int, bits: int) -> Self:
        """The noise of one round of mode client_shared.

        sites: values in the sum at most. honest: m. bits: of a word. Raises PrivacyError when no scale keeps
        the sum in range.
        """
        assert privacy.noise_multiplier is not None and privacy.clip_norm is not None
        multiplier = privacy.noise_multiplier
        return cls(multiplier, privacy.clip_norm, honest, scale(multiplier, sites, honest, bits))

    @property
    def step(self) -> float:
        """What one grid step is worth."""
        return self.multiplier * self.clip_norm / (math.sqrt(self.honest) * self.std)

    def add(self, words: Words, source: WordSource) -> None:
        """Add this site's part of the noise to words, in place.

        words: (P + 1,) uint64 or uint32. The last one, the weight, is the same at every site and gets no
        noise.
        """
        values = words[:-1]
        for start in range(0, len(values), 1 << 18):
            piece = values[start : start + (1 << 18)]
            np.add(piece, discrete_gaussian(len(piece), self.std, source).astype(words.dtype), out=piece)


def scale(multiplier: float, sites: int, honest: int, bits: int) -> int:
    """The largest scale s at which a sum with noise fits into its words.

    s is the largest power of two with n s sqrt(m) / sigma + 8 s sqrt(n) below half the range of the words.

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
