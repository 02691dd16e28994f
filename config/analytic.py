"""What `strategy: analytic` does unless it is told otherwise; the server and the sites read it here."""

from collections.abc import Mapping
from typing import Any

DEFAULT_SHRINKAGE: Mapping[str, float | str] = {
    "gaussian": 0.1,
    "ridge": "gcv",
    "balanced_ridge": "validation",
}
"""By head. Cross-validation counts samples: of classes of very different size it shrinks too little."""


def shrinkage_of(keys: Mapping[str, Any]) -> float | str:
    """What the strategy's keys come to: a number, or how one is chosen."""
    given = keys.get("shrinkage")
    return DEFAULT_SHRINKAGE[keys.get("head") or "gaussian"] if given is None else given
