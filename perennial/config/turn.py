"""A site's turn in a ring, as the server sends it: which data to use, and what to freeze."""

from typing import Annotated, Literal

from pydantic import Field

from perennial.foundation.block import Block

MOST_SEGMENTS = 10_000
USUAL_SEGMENTS = 4
"""Where an experiment names no number."""


class FeatureNoise(Block):
    """What a site does to the outputs of one module while it trains (models/feature_noise.py)."""

    module: str
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    std: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Turn(Block):
    """One turn, sent in TrainRequest.settings under the key "turn".

    sweep: number of this pass of the model over all sites in its round, from 1 to segments. least: fewest
    samples in a segment; None: 32, or fewer where the site has less. stratify: every segment has its part of
    each class.
    frozen: tensors that the site must return as they were.
    """

    sweep: Annotated[int, Field(ge=1, le=MOST_SEGMENTS)]
    segments: Annotated[int, Field(ge=1, le=MOST_SEGMENTS)]
    sizes: Literal["variable", "equal"] = "variable"
    least: Annotated[int, Field(ge=1)] | None = None
    stratify: bool = False
    frozen: tuple[str, ...] = ()
    features: FeatureNoise | None = None
