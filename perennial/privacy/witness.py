"""Shows an audit what a release was made of, in the process that makes it, and only while somebody watches.

What is shown is private. Nothing here leaves a site: `perennial audit` watches runs over data that it made.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

_watchers: list[list["Seen"]] = []


@dataclass(frozen=True)
class Seen:
    """What one release, one step or one site's share was made of.

    kind: step (of DP-SGD), update, sum (at the server), statistics (sums of features), share (of the noise in
    a masked sum) or clip (of an update that the server will noise).
    noise: (n,) released less un-noised values, in units of the values. largest: L2 norms of single
    contributions as they were added. batch, units: how many units a step drew, and of how many. place: which
    sum a share belongs to. part, members: what a release over a part is charged as, and its rows.
    """

    kind: str
    noise: np.ndarray | None = None
    largest: tuple[float, ...] = ()
    batch: int = 0
    units: int = 0
    place: str = ""
    part: str = ""
    members: tuple[int, ...] = ()


def watched() -> bool:
    """Whether a watching() block is active, so that a copy is worth keeping."""
    return bool(_watchers)


def tell(seen: Seen) -> None:
    """Add what was seen to the list of each active watching() block."""
    for watcher in _watchers:
        watcher.append(seen)


@contextmanager
def watching() -> Iterator[list[Seen]]:
    """Context manager: a list that collects what tell() is given in the block."""
    seen: list[Seen] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)
