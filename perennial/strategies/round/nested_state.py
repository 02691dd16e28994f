"""Values under a prefix of their own: the state of a strategy inside another one, tensors of a request."""

from collections.abc import Mapping
from typing import Any


def nested(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their names prefixed by `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in state.items()}


def part(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values that nested() prefixed, under their own names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
