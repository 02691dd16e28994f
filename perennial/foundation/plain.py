"""Values that a file or a message can hold, and the blocks of a file that a person writes.

A plain value is text, a number, truth, nothing, or a list or mapping of these: never a class, a function or a
name that was looked up.
"""

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from typing_extensions import TypeAliasType

if TYPE_CHECKING:
    # pyright leaves to the reader of a key what stands under it; pydantic holds the type below
    Plain = Any
    PlainObject = dict[str, Any]
else:
    Plain = TypeAliasType("Plain", "bool | int | float | str | list[Plain] | dict[str, Plain] | None")
    PlainObject = dict[str, Plain]


def read_object(content: str | bytes) -> PlainObject:
    """The mapping in JSON text. Raises ValueError saying what was found instead."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"found {found!r:.60}, allowed a JSON object")
    return found


def require_plain(found: Any) -> PlainObject:
    """A mapping of which every value is plain. Raises ValueError naming one that is not."""
    return _OBJECT.validate_python(found)


_OBJECT: TypeAdapter[Any] = TypeAdapter(PlainObject)


class Block(BaseModel):
    """A block of a file that is checked when read: no unknown key, and no change of a value afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def is_set(self, key: str) -> bool:
        """Whether the value of a key differs from its default, and so must be written to a file."""
        return getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)


class FiniteBlock(Block):
    """A block in which no number may be infinite or not a number."""

    model_config = ConfigDict(allow_inf_nan=False)
