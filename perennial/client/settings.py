"""The parts of a training request's settings, each checked by the class that says what may stand there."""

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from perennial.foundation.errors import ProtocolError
from perennial.protocol.messages import TrainRequest

Part = TypeVar("Part")


def part_of_settings(request: TrainRequest, key: str, kind: type[Part] | TypeAdapter[Part]) -> Part | None:
    """The value under a key of the request's settings, validated as `kind`; None without that key.

    Raises ProtocolError naming the key that is wrong.
    """
    try:
        settings: Any = json.loads(request.settings)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"TrainRequest: settings: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ProtocolError(f"TrainRequest: settings: found {settings!r:.60}, allowed a JSON object")
    if key not in settings:
        return None
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(settings[key])
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(("settings", key, *map(str, fault["loc"])))
        raise ProtocolError(f"TrainRequest: {place}: found {fault['input']!r:.40}; {fault['msg']}") from None
