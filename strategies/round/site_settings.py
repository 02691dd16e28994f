"""What a strategy asks of a site beside plain training, written into a request's settings."""

import json
from dataclasses import replace
from typing import Any

from perennial.protocol.messages import TrainRequest


def with_settings(request: TrainRequest, **settings: Any) -> TrainRequest:
    """request with more settings, beside those that an outer strategy put there."""
    return replace(request, settings=json.dumps({**json.loads(request.settings), **settings}, sort_keys=True))
