"""What the SuperLink says of itself beside the runs, for the operator's pages.

So they know of it when no run goes. The file's time is its heartbeat. `perennial deploy status` reads it
too, and so starts no command of Flower's.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perennial.deploy.run_book import FlowerRun
from perennial.foundation.files import replace_file
from perennial.foundation.heartbeat import BEAT, SILENT_AFTER, last_beat, renew

STATUS = ".superlink.json"
"""In the folder of all runs."""
LARGEST = 2**24
PATIENCE = 2
"""Intervals without a heartbeat after which Flower's SuperLink takes a node for gone."""
MISSED = 20.0
"""Seconds without a heartbeat after which a SuperNode counts as silent; it beats every 7 to 9."""
log = logging.getLogger("perennial.deploy")


@dataclass(frozen=True)
class SuperLinkStatus:
    """The state of a SuperLink.

    silent_for: seconds since its last heartbeat. certificate_ends: when the certificate that it serves with
    expires, in seconds since 1970. sites: of every registered site, None while it is connected, else the time
    since which it is silent, in seconds since 1970; 0 if it was never connected. others: `added` or `revoked`
    of every other site on record. runs: Flower's list of runs by id, as of `looked`, in seconds since 1970.
    unknown: status by id of those that go on and that no name here has (deploy/run_book.py).
    """

    silent_for: float
    certificate_ends: float
    sites: Mapping[str, float | None]
    others: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, FlowerRun] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    looked: float = 0.0

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
        runs = {str(run): FlowerRun(*map(str, facts)) for run, facts in found.get("runs", {}).items()}
        unknown = {str(run)[:40]: str(state)[:40] for run, state in found.get("unknown", {}).items()}
        ends, looked = float(found["certificate_ends"]), float(found.get("looked", 0.0))
        return SuperLinkStatus(silent_for, ends, sites, others, runs, unknown, looked)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def keep_status(
    folder: Path,
    certificate_ends: float,
    sites: Callable[[], Mapping[str, float | None]],
    others: Callable[[], Mapping[str, str]] = dict,
    runs: Callable[[], Mapping[str, FlowerRun]] = dict,
    unknown: Callable[[Mapping[str, FlowerRun]], Mapping[str, str]] = lambda _: {},
) -> None:
    """Write the status from now on, in threads of its own, every BEAT seconds.

    folder: of all runs. sites, others, runs, unknown: as in SuperLinkStatus; an error in them is logged once.
    """
    path = folder / STATUS

    def say() -> None:
        failed = ""
        while True:
            try:
                # before the look: whoever changes a run later must not take this for an answer
                looked, listed = time.time(), runs()
                status = {
                    "certificate_ends": certificate_ends,
                    "sites": dict(sorted(sites().items())),
                    "others": dict(others()),
                    "runs": {run: (facts.status, facts.bundle, facts.name) for run, facts in listed.items()},
                    "unknown": dict(unknown(listed)),
                    "looked": looked,
                }
                replace_file(path, json.dumps(status).encode(), mode=0o644, durable=False)
                failed = ""
            except Exception as error:  # of Flower's database too, or of a full disk
                if str(error) != failed:
                    failed = str(error)
                    log.warning("what the live pages know of the SuperLink is not up to date: %s", error)
            time.sleep(BEAT)

    def beat() -> None:
        while True:
            if path.exists():
                renew(path)
            time.sleep(BEAT)

    # apart, because a busy database lets `sites` wait, and the SuperLink lives all the same
    for target in (say, beat):
        threading.Thread(
            target=target, name=f"status of the SuperLink: {target.__name__}", daemon=True
        ).start()


class SilentSites:
    """Finds since when registered sites are silent. state: Flower's LinkState. online: its status word."""

    def __init__(self, state: Any, online: str) -> None:
        self._state, self._online = state, online
        self._since: dict[str, float] = {}

    def look(self, names: Mapping[str, str]) -> dict[str, float | None]:
        """SuperLinkStatus.sites as of now. names: site name by Flower's id of its node, as text."""
        nodes = {str(node.node_id): node for node in self._state.get_node_info()}
        now = time.time()
        found = {name: self._silent_since(nodes.get(node), now) for node, name in names.items()}
        # Flower notes another moment once it takes a silent node for gone
        self._since = {
            name: self._since.get(name, since) for name, since in found.items() if since is not None
        }
        return found | self._since

    def _silent_since(self, node: Any, now: float) -> float | None:
        if node is None or not node.online_until:
            return 0.0
        if node.status != self._online:
            return round(node.online_until, 1)
        beat = node.online_until - PATIENCE * node.heartbeat_interval
        return round(beat, 1) if now - beat > MISSED else None
