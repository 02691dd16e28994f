"""What the gateway says of the SuperLink and its sites, in a file beside the runs for the operator's pages.

So they know of it when no run goes. The file's time is its heartbeat.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perennial.foundation.heartbeat import SILENT_AFTER, last_beat

STATUS = ".superlink.json"
"""In the folder of all runs."""
LARGEST = 2**24


@dataclass(frozen=True)
class SuperLinkStatus:
    """The state of a SuperLink.

    silent_for: seconds since its last heartbeat. certificate_ends: when the certificate that it serves with
    expires, in seconds since 1970. sites: of every registered site, None while it is connected, else the time
    since which it is silent, in seconds since 1970; 0 if it was never connected. others: `added` or `revoked`
    of every other site on record. unknown: status by id of Flower's runs that go on and that no name here has
    (deploy/run_book.py).
    """

    silent_for: float
    certificate_ends: float
    sites: Mapping[str, float | None]
    others: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.silent_for < SILENT_AFTER


def read_superlink_status(runs: Path) -> SuperLinkStatus | None:
    """The status that the SuperLink wrote into the folder of all runs; None if none can be read."""
    path = runs / STATUS
    silent_for = last_beat(path)
    try:
        if silent_for is None or path.is_symlink() or path.stat().st_size > LARGEST:
            return None
        found = json.loads(path.read_bytes())
        sites = {
            str(name)[:80]: None if since is None else float(since) for name, since in found["sites"].items()
        }
        others = {str(name)[:80]: str(state)[:20] for name, state in found.get("others", {}).items()}
        unknown = {str(run)[:40]: str(state)[:40] for run, state in found.get("unknown", {}).items()}
        return SuperLinkStatus(silent_for, float(found["certificate_ends"]), sites, others, unknown)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
