"""The label counts that a site reports, checked before anything is computed with them."""

from typing import Any

from perennial.protocol.stamp import MAX_EXAMPLES
from perennial.strategies.round.gate import Rejected


def checked_counts(value: Any, samples: int) -> list[int]:
    """Check a site's label counts, and spread withheld samples evenly over the classes that it withholds.

    samples: number on which it trained. Returns a count for each class.
    Raises Rejected for anything but whole numbers and null, not all of them 0.
    """
    numbers = isinstance(value, list) and all(
        count is None or (type(count) is int and 0 <= count <= MAX_EXAMPLES) for count in value
    )
    if not numbers or not any(count is None or count for count in value):
        raise Rejected(f"label_counts: found {value!r:.60}, allowed whole numbers from 0, one above 0")
    withheld = sum(count is None for count in value)
    if not withheld:
        return value
    # at least one sample each, so that a row is never empty
    rest = max(withheld, samples - sum(count or 0 for count in value))
    return [rest // withheld if count is None else count for count in value]
