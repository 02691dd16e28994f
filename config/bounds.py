"""What one site can do to the model at most: `bounds:` of an experiment."""

from typing import Literal

from pydantic import Field

from perennial.foundation.block import Block

MAX_SAMPLES = 1 << 20


class BoundsConfig(Block):
    """Bounds on what a site claims and sends; the journal names each site that met one.

    Those that are multiples are of the largest median of former rounds: a task in which most sites hold next
    to nothing must not stop the few that do. A run's first round takes its own medians.
    """

    max_samples: int = Field(default=MAX_SAMPLES, ge=1, le=100_000_000)
    """A site that says it trained on more samples counts as if it had said this."""
    registered: dict[str, int] = Field(default_factory=dict)
    """The same for single sites, from their registration; the multiple below is not for them."""
    samples_multiple: float | None = Field(default=5.0, ge=1)
    """A site counts as at most so many times the median of the samples that sites claim; null: no bound."""
    norm_multiple: float | None = Field(default=3.0, ge=1)
    """An update may be so many times as long as the median one; null: no bound."""
    on_norm: Literal["scale", "drop"] = "scale"
    """A longer update is scaled down to the bound, or dropped. SCAFFOLD, FedDyn and AdaBest take dropping
    alone: what such a site remembers has to agree with what the server folded."""
    window: int = Field(default=10, ge=1)
    """So many former rounds count."""
