"""What one site can do to the model at most: `bounds:` of an experiment."""

from pydantic import BaseModel, ConfigDict, Field

MAX_SAMPLES = 1 << 20


class BoundsConfig(BaseModel):
    """Bounds on what a site claims and sends. None of them stops a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_samples: int = Field(default=MAX_SAMPLES, ge=1, le=100_000_000)
    """A site that says it trained on more samples counts as if it had said this."""
