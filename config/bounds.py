"""What one site can do to the model at most: `bounds:` of an experiment."""

from typing import Literal

from pydantic import Field

from perennial.foundation.block import Block

MAX_SAMPLES = 1 << 20
CLOSED_FORM = ("registered", "share")
"""Keys that mean something where sites send sums."""


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
    share: float | None = Field(default=None, gt=0, lt=1)
    """Closed form, from four sites on: the share of a task's samples that one site's sums count for at most;
    null: no bound, and the model is that of all data in one place."""

    def require_fit(self, closed_form: bool) -> None:
        """Raises ValueError naming a key that would do nothing. closed_form: whether sites send sums."""
        here = CLOSED_FORM if closed_form else type(self).model_fields.keys() - {"share"}
        for key, field in type(self).model_fields.items():
            found = getattr(self, key)
            if key not in here and found != field.get_default(call_default_factory=True):
                what = "strategy analytic has sums and no updates" if closed_form else "sites send updates"
                raise ValueError(
                    f"bounds.{key}: found {found}, which does nothing: {what}; "
                    f"allowed: {', '.join(sorted(here))}"
                )
