"""What the server of a ring says to the site whose turn it is: which part of its data, and what to leave as
it is."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_SEGMENTS = 10_000


class Turn(BaseModel):
    """One turn, sent in TrainRequest.settings under the key "turn".

    sweep: which time the model goes round in this round, from 1 to segments. least: samples that a segment
    must have; None: 32, or fewer where the site has less. frozen: tensors that the site must return as they
    were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    sweep: Annotated[int, Field(ge=1, le=MOST_SEGMENTS)]
    segments: Annotated[int, Field(ge=1, le=MOST_SEGMENTS)]
    sizes: Literal["variable", "equal"] = "variable"
    least: Annotated[int, Field(ge=1)] | None = None
    frozen: tuple[str, ...] = ()
