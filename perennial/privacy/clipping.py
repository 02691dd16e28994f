"""Bounds what one site can contribute: the L2 norm over all its float parameters together.

The sensitivity of a release is stated as one norm over the concatenation; clipping tensor by tensor would
multiply it by the square root of their number.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from perennial.foundation.errors import PrivacyError
from perennial.privacy.config import AdaptiveClippingConfig
from perennial.privacy.noise import Noise

# Rounding each scaled coordinate to float32 changes the norm by at most this share.
_ROUNDING_MARGIN = 1 - 2.0**-23

LEARNING_RATE = 0.2
"""Of the geometric step of an adaptive clip norm."""
COUNT_NOISE = 2.0
"""Noise on the count of unclipped sites over that of updates: with 2 the updates' noise grows by 3 %."""


def clip(vector: Tensor, clip_norm: float) -> float:
    """Scale vector in place so that its L2 norm is at most clip_norm; returns its norm before.

    vector: (P,) float, all float parameters of an update. A vector within the bound keeps its bits, so a zero
    vector stays zero. A longer one keeps its direction and ends at most 2**-22 (relative) below clip_norm,
    never above: the guarantee is stated for the rounded numbers that leave, not for the real ones. A vector
    with NaN or infinity becomes zero, and its norm is that: a model can be made so that training overflows
    because of one sample, and whether it did must not show. Raises PrivacyError when clip_norm is not finite
    and positive.
    """
    return clip_tensors([vector], clip_norm)


def clip_tensors(tensors: Iterable[Tensor], clip_norm: float) -> float:
    """Clip several tensors together in place, as clip() clips one vector; returns the norm before.

    tensors: any shapes, 0-d ones included. Integer and boolean tensors are neither measured nor changed: a
    step counter is no contribution of the data, and would otherwise use up the norm.
    """
    if not 0 < clip_norm < math.inf:
        raise PrivacyError(f"clip norm is {clip_norm}; allowed: a finite number above 0")
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    squares = [
        torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in floats if tensor.numel()
    ]
    norm = math.sqrt(sum(square.item() for square in squares))
    if not math.isfinite(norm):
        for tensor in floats:
            tensor.zero_()
    elif norm > clip_norm:
        for tensor in floats:
            tensor.copy_(tensor.double().mul_(clip_norm / norm * _ROUNDING_MARGIN))
    return norm


@dataclass
class AdaptiveClipping:
    """The clip norm of client_central as it follows a quantile of the update norms, at no extra cost.

    The number of unclipped sites is released with noise beside the sum. Shifted by one half, a site moves it
    by at most 1/2, so the pair costs what one Gaussian release with noise_multiplier costs, provided that the
    sum gets the larger noise of `update_noise_multiplier`. Every value of clip_norm is then public.

    Andrew et al. 2021 (arXiv 1905.03871), theorem 1 and algorithm 1.
    """

    settings: AdaptiveClippingConfig
    noise_multiplier: float
    clip_norm: float

    @property
    def count_noise_multiplier(self) -> float:
        """Standard deviation of the noise on the number of unclipped sites."""
        return COUNT_NOISE * self.noise_multiplier

    @property
    def update_noise_multiplier(self) -> float:
        """Noise multiplier of the sum, so that sum and count together cost noise_multiplier."""
        return (self.noise_multiplier**-2 - (2 * self.count_noise_multiplier) ** -2) ** -0.5

    def step(self, within: int, sites: int, source: Noise) -> float:
        """Release the noised count of one round and move clip_norm; returns the new clip_norm.

        within: sites whose norm before clipping was at most clip_norm. sites: public number of expected
        sites; it must not depend on who answered.
        """
        noise = float(source.normal((1,), self.count_noise_multiplier))
        share = (within - sites / 2 + noise) / sites + 0.5
        self.clip_norm *= math.exp(-LEARNING_RATE * (share - self.settings.quantile))
        return self.clip_norm
