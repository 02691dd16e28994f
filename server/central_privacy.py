"""Mode client_central at the server: noise once on the aggregate, and what the next round needs to know.

The noise is drawn after the last reply and before anything sees the new model. A round that is repeated after
a crash draws fresh noise, and is counted as one more release (server/releases.py).
"""

from collections.abc import Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.streams import stream
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import NoiseSource, SecureNoise, SeededNoise, add_noise
from perennial.privacy.protection import central_noise_std
from perennial.privacy.witness import Seen, tell, watched
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.outcome import RoundOutcome

# Above this a norm is not that of a clipped update, whatever the order in which its squares were added.
_TOLERANCE = 1 + 1e-5


class CentralPrivacy:
    """Noise on the aggregate, made by the server in mode client_central."""

    def __init__(self, privacy: PrivacyConfig, strategy: IncrementalStrategy, seed: int) -> None:
        """Raises PrivacyError when the strategy does not bound the weight of one site."""
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        self._privacy, self._strategy, self._seed = privacy, strategy, seed
        self._clip_norm, self._multiplier = privacy.clip_norm, privacy.noise_multiplier
        strategy.largest_weight(1)

    @classmethod
    def of(cls, privacy: PrivacyConfig, strategy: IncrementalStrategy, seed: int) -> Self | None:
        """The protection of this run; None in other modes."""
        return cls(privacy, strategy, seed) if privacy.mode == "client_central" else None

    def finish_round(self, outcome: RoundOutcome, number: int) -> None:
        """Noise the new model in place of the exact one; a skipped round releases nothing."""
        if outcome.arrays is None:
            return
        source = self._source(number)
        largest = self._strategy.largest_weight(outcome.asked)
        std = central_noise_std(self._clip_norm, self._multiplier, largest)
        outcome.arrays = noised(outcome.arrays, std, source)
        outcome.details = outcome.details | {"clip_norm": self._clip_norm, "noise_source": source.name}

    @property
    def max_update_norm(self) -> float:
        """Let the gate measure what sites were asked to clip, so that no guarantee rests on their word."""
        return self._clip_norm * _TOLERANCE

    def _source(self, number: int) -> NoiseSource:
        if self._privacy.noise_source == "secure":
            return SecureNoise()
        return SeededNoise(stream(self._seed, "dp-noise-server", number))


def noised(arrays: Mapping[str, Tensor], std: float, source: NoiseSource) -> dict[str, Tensor]:
    """A copy of the arrays with N(0, std^2) on each value of the floating ones."""
    result = {}
    for name, tensor in arrays.items():
        result[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.is_floating_point():
            add_noise(result[name].view(-1), std, source)
    if watched():
        pairs = [(result[name], tensor) for name, tensor in arrays.items() if tensor.is_floating_point()]
        differences = [(after.double() - before.double()).flatten().cpu().numpy() for after, before in pairs]
        tell(Seen("sum", np.concatenate(differences)))
    return result
