"""The parts of a training request's settings, each checked by the class that says what may stand there."""

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from perennial.foundation.errors import ProtocolError
from perennial.foundation.plain import read_object
from perennial.protocol.messages import TrainRequest

Part = TypeVar("Part")


def part_of_settings(request: TrainRequest, key: str, kind: type[Part] | TypeAdapter[Part]) -> Part | None:
    """The value under a key of the request's settings, validated as `kind`; None without that key.

    Raises ProtocolError naming the key that is wrong.
    """
    try:
        settings = read_object(request.settings)
    except ValueError as error:
        raise ProtocolError(f"TrainRequest: settings: {error}") from error
    if key not in settings:
        return None
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(settings[key])
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(("settings", key, *map(str, fault["loc"])))
        raise ProtocolError(f"TrainRequest: {place}: found {fault['input']!r:.40}; {fault['msg']}") from None
