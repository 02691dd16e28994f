"""What sites of a simulation do beside their part: `absence:` and `adversaries:` of an experiment."""

from typing import Literal

from pydantic import Field, model_validator

from perennial.foundation.block import Block


class AbsenceConfig(Block):
    """One stretch of rounds in which a site does not answer; for simulation."""

    site: str
    first_round: int = Field(ge=1)
    last_round: int | None = Field(default=None, ge=1)
    """None: for good."""

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> "AbsenceConfig":
        if self.last_round is not None and self.last_round < self.first_round:
            raise ValueError(
                f"last_round: found {self.last_round}, allowed from first_round, {self.first_round}"
            )
        return self


AdversaryKind = Literal["free_rider", "label_flip"]


class AdversaryConfig(Block):
    """A site that cheats in every round; for simulation."""

    site: str
    kind: AdversaryKind
    """free_rider: returns the model as it came. label_flip: trains with every class called another one."""
