"""Mode client_central at the server: noise once on the aggregate.

The noise is drawn after the last reply and before anything sees the new model. A round that is repeated after
a crash draws fresh noise, and is counted as one more release (server/releases.py).
"""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.protection import central_noise_std
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import RoundOutcome

# Above this a norm is not that of a clipped update, whatever the order in which its squares were added.
_TOLERANCE = 1 + 1e-5


class CentralPrivacy:
    """Noise on the aggregate, made by the server in mode client_central."""

    def __init__(self, privacy: PrivacyConfig, strategy: IncrementalStrategy) -> None:
        """Raises PrivacyError when the strategy does not bound the weight of one site."""
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        self._strategy = strategy
        self._clip_norm, self._noise_multiplier = privacy.clip_norm, privacy.noise_multiplier
        strategy.largest_weight(1)

    @classmethod
    def of(cls, privacy: PrivacyConfig, strategy: IncrementalStrategy) -> Self | None:
        """The noise of this run at the server; None in other modes."""
        return cls(privacy, strategy) if privacy.mode == "client_central" else None

    def finish_round(self, outcome: RoundOutcome) -> None:
        """Add noise to the round's new model, which replaces it; a skipped round is left alone."""
        if outcome.arrays is None:
            return
        weight = self._strategy.largest_weight(outcome.asked)
        std = central_noise_std(self._clip_norm, self._noise_multiplier, weight)
        outcome.arrays = noised(outcome.arrays, std, Noise())
        outcome.details = outcome.details | {"clip_norm": self._clip_norm}

    @property
    def max_update_norm(self) -> float:
        """The norm above which the gate rejects an update, so that no guarantee rests on what sites say."""
        return self._clip_norm * _TOLERANCE


def noised(arrays: Mapping[str, Tensor], std: float, source: Noise) -> dict[str, Tensor]:
    """A copy of the arrays with N(0, std^2) on each value of the floating ones."""
    result = {}
    for name, tensor in arrays.items():
        result[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.is_floating_point():
            add_noise(result[name].view(-1), std, source)
    return result
