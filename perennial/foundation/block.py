"""A block of a file that a person writes."""

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A block of a file that is checked when read: no unknown key, and no change of a value afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def is_set(self, key: str) -> bool:
        """Whether the value of a key differs from its default, and so must be written to a file."""
        return getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)


class FiniteBlock(Block):
    """A block in which no number may be infinite or not a number."""

    model_config = ConfigDict(allow_inf_nan=False)
