"""Noise that sites share: each adds a part of it, and the sum of m honest parts hides one site.

A part is a discrete Gaussian of s grid steps, a step being sigma C / (sqrt(m) s): variance sigma^2 C^2 / m.
Sums of discrete Gaussians are no discrete Gaussians, but nearly: with tau = 10 sum_{k<m} exp(-2 pi^2 s^2 k /
(k + 1)), the sum over P coordinates is (1/2) e^2-concentrated differentially private with

    e = min( sqrt(D^2 / (m s^2) + tau P / 2),  D / (sqrt(m) s) + tau sqrt(P) )

for a contribution of norm D steps that is there or zero. Kairouz, Liu and Steinke 2021 (arXiv 2102.06387),
theorem 1 and proposition 2.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from perennial.foundation.errors import PrivacyError
from perennial.privacy.clipping import AdaptiveClipping
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.discrete_gaussian import LARGEST_STD, WordSource, discrete_gaussian
from perennial.privacy.secure.masks import Words

UNIT = 1 << 10
"""Steps of one half of the count that adaptive clipping needs."""
MOST_VALUES = 10**9
"""Coordinates that tau is counted for: more than any model here has."""
# Rounding of the step and of a quotient in float64, far above what either can be.
_ROUNDING = 1 - 2.0**-40


@dataclass(frozen=True)
class SharedNoise:
    """One site's part. multiplier: sigma of the update. clip_norm: C. honest: m. std: s, in steps.

    count_multiplier: of the noise on adaptive clipping's count, 0 without one.
    """

    multiplier: float
    clip_norm: float
    honest: int
    std: int
    count_multiplier: float = 0.0

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
        """What one grid step is worth."""
        return self.multiplier * self.clip_norm / (math.sqrt(self.honest) * self.std)

    @property
    def unit(self) -> int:
        """Steps by which a site within the clip norm differs from the middle; one beyond it, by as many
        below."""
        return UNIT

    @property
    def count_std(self) -> int:
        """Of one site's noise on the count, in steps; one site moves the count by half of it, which is one
        UNIT."""
        return math.ceil(2 * UNIT * self.count_multiplier / math.sqrt(self.honest))

    def add(self, words: Words, source: WordSource, *, counts_within: bool) -> None:
        """Add this site's part to words, (P + 1 or 2,) uint64 or uint32, in place. The weight, the first
        after the P values, is the same at every site and gets none."""
        beside = 1 + counts_within
        values = words[: len(words) - beside]
        for start in range(0, len(values), 1 << 18):
            piece = values[start : start + (1 << 18)]
            np.add(piece, discrete_gaussian(len(piece), self.std, source).astype(words.dtype), out=piece)
        if counts_within:
            words[-1] += discrete_gaussian(1, self.count_std, source).astype(words.dtype)[0]


def scale(multiplier: float, sites: int, honest: int, bits: int) -> int:
    """s: the largest power of two with n s sqrt(m) / sigma + 8 s sqrt(n) below half the range of the words.

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
    if std * per_step >= 2.0 ** (bits - 1) or std < 4:
        raise PrivacyError(
            f"client_shared: a sum of {sites} sites does not fit {bits}-bit words; use sums.bits 64"
        )
    return std


def tau(std: int, honest: int) -> float:
    """How far the sum of so many discrete Gaussians can be from one, for each coordinate."""
    return 10 * math.fsum(math.exp(-2 * math.pi**2 * std**2 * k / (k + 1)) for k in range(1, honest))


def effective_multiplier(multiplier: float, std: int, honest: int, values: int = MOST_VALUES) -> float:
    """The noise multiplier of a continuous Gaussian that costs at least as much as m honest parts.

    multiplier: sigma as configured. std: s. values: coordinates of the release. Its zero-concentrated cost,
    1 / (2 multiplier^2), holds for every Renyi order; PRV's tighter figure does not.
    """
    plain = 1 / (multiplier * _ROUNDING)
    far = tau(std, honest)
    cost = min(math.sqrt(plain**2 + far * values / 2), plain + far * math.sqrt(values))
    return 1 / cost
