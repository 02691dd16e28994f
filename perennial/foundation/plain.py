"""Values that a file or a message can hold: text, numbers, truth, nothing, lists and mappings of these.

A value of this type is never a class, a function or a name that was looked up.
"""

import json
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
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
