"""Adapts the clip norm of mode client_shared to the noised count of sites whose updates were within it.

The sites' noise is in the opened sum already, so the server has none to add.
"""

import math
from typing import Any, Self

from perennial.privacy.config import AdaptiveClippingConfig, PrivacyConfig
from perennial.strategies.round.context import RoundOutcome


class SharedClipping:
    """The clip norm of mode client_shared, which follows the sites' masked answers.

    state: a dict of the checkpoint, kept up to date here. The interface is CentralPrivacy's.
    """

    def __init__(
        self,
        settings: AdaptiveClippingConfig,
        clip_norm: float,
        state: dict[str, Any],
    ) -> None:
        self._settings, self._state = settings, state
        state.setdefault("clip_norm", clip_norm)

    @classmethod
    def of(cls, privacy: PrivacyConfig, state: dict[str, Any]) -> Self | None:
        """The adaptive clip norm of this run; None if it is fixed, and in other modes."""
        if privacy.mode != "client_shared" or privacy.adaptive_clipping is None:
            return None
        assert privacy.clip_norm is not None
        return cls(privacy.adaptive_clipping, privacy.clip_norm, state)

    @property
    def sent_clip_norm(self) -> float:
        """The clip norm that requests of the coming round carry."""
        return self._state["clip_norm"]

    max_update_norm = None
    """No bound of the server's: it sees no update."""
    observers = ()

    def finish_round(self, outcome: RoundOutcome, number: int) -> None:
        """Move the clip norm towards its quantile by the round's noised count; a skipped round leaves it."""
        if outcome.arrays is None:
            return
        outcome.details = outcome.details | {"clip_norm": self.sent_clip_norm}
        share = outcome.details["secure"]["count"] / outcome.asked + 0.5
        self._state["clip_norm"] *= math.exp(
            -self._settings.learning_rate * (share - self._settings.quantile)
        )

    def bayesian_epsilon(self) -> None:
        """None: this mode has no Bayesian figure."""
