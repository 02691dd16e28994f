"""A block of a file that a person writes."""

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """Checked when it is read: a key that is not declared is refused, and no value changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def is_set(self, key: str) -> bool:
        """Whether a key differs from its default, so that a file written from the block reads back."""
        return getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)


class FiniteBlock(Block):
    """A block in which no number may be infinite or not a number."""

    model_config = ConfigDict(allow_inf_nan=False)
