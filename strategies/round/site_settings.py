"""What a strategy asks of a site beside plain training, written into a request's settings."""

import json
from dataclasses import replace
from typing import Any

from perennial.protocol.messages import TrainRequest


def with_settings(request: TrainRequest, **settings: Any) -> TrainRequest:
    """request with more settings, beside those that an outer strategy put there."""
    return replace(request, settings=json.dumps({**json.loads(request.settings), **settings}, sort_keys=True))


class SameForAll:
    """Remembers what a request became, so that sites that get the same message share one record."""

    def __init__(self) -> None:
        self._made: list[tuple[TrainRequest, TrainRequest]] = []

    def get(self, request: TrainRequest) -> TrainRequest | None:
        return next((made for original, made in self._made if original is request), None)

    def put(self, request: TrainRequest, made: TrainRequest) -> TrainRequest:
        self._made.append((request, made))
        return made

    def clear(self) -> None:
        self._made.clear()
