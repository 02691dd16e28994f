"""Mode client_central at the server: noise once on the aggregate, and the clip norm of the next round.

The noise is drawn after the last reply and before anything sees the new model. A round that is repeated after
a crash draws fresh noise, and is counted as one more release (server/releases.py).
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from perennial.privacy.clipping import AdaptiveClipping
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.protection import central_noise_std
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import Admitted
from perennial.strategies.round.request import Arrays, Observer

# Above this a norm is not that of a clipped update, whatever the order in which its squares were added.
_TOLERANCE = 1 + 1e-5


class CentralPrivacy:
    """Noise on the aggregate, made by the server in mode client_central.

    state: a dict of the checkpoint, kept up to date here.
    """

    def __init__(self, privacy: PrivacyConfig, strategy: IncrementalStrategy, state: dict[str, Any]) -> None:
        """Raises PrivacyError when the strategy does not bound the weight of one site."""
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        self._strategy, self._state = strategy, state
        self._update_multiplier = privacy.noise_multiplier
        state.setdefault("clip_norm", privacy.clip_norm)
        self._adaptive = None
        if privacy.adaptive_clipping is not None:
            self._adaptive = AdaptiveClipping(
                privacy.adaptive_clipping, privacy.noise_multiplier, state["clip_norm"]
            )
            self._update_multiplier = self._adaptive.update_noise_multiplier
        self._within = 0
        strategy.largest_weight(1)

    @classmethod
    def of(cls, privacy: PrivacyConfig, strategy: IncrementalStrategy, state: dict[str, Any]) -> Self | None:
        """The noise of this run at the server; None in other modes."""
        return cls(privacy, strategy, state) if privacy.mode == "client_central" else None

    @property
    def sent_clip_norm(self) -> float | None:
        """The clip norm that requests carry; None if the experiment fixes it."""
        return self._state["clip_norm"] if self._adaptive else None

    @property
    def clip_norm(self) -> float:
        """The clip norm of the coming round."""
        return self._state["clip_norm"]

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The functions that are called with each aggregated reply."""
        return (self.observe,)

    def finish_round(self, outcome: RoundOutcome, number: int) -> None:
        """Add noise to the round's new model, and adapt the clip norm.

        outcome: its arrays are replaced, and its details name the clip norm, which is public; a skipped round
        is left alone.
        """
        within, self._within = self._within, 0
        if outcome.arrays is None:
            return
        source = Noise()
        std = central_noise_std(
            self.clip_norm, self._update_multiplier, self._strategy.largest_weight(outcome.asked)
        )
        outcome.arrays = noised(outcome.arrays, std, source)
        outcome.details = outcome.details | {"clip_norm": self.clip_norm}
        if self._adaptive is not None:
            self._state["clip_norm"] = self._adaptive.step(within, outcome.asked, source)

    def observe(self, reply: Admitted, reference: Arrays, sweep: int) -> dict[str, Any]:
        """Count an aggregated reply for the clip norm; returns no details."""
        self._within += bool(reply.within_clip_norm)
        return {}

    @property
    def max_update_norm(self) -> float:
        """The norm above which the gate rejects an update, so that no guarantee rests on what sites say."""
        return self.clip_norm * _TOLERANCE


def noised(arrays: Mapping[str, Tensor], std: float, source: Noise) -> dict[str, Tensor]:
    """A copy of the arrays with N(0, std^2) on each value of the floating ones."""
    result = {}
    for name, tensor in arrays.items():
        result[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.is_floating_point():
            add_noise(result[name].view(-1), std, source)
    return result
