"""Computes an upper bound on the privacy that each site has spent in a run that goes on."""

import math
from collections import Counter
from pathlib import Path

from perennial.config.experiment import Experiment, load_experiment
from perennial.foundation.errors import PerennialError, PrivacyError
from perennial.live.tail import Tail, texts
from perennial.privacy.composition import compose
from perennial.privacy.entries import Entry

Release = tuple[str, tuple[Entry, ...]]
"""(name of a release that is made once or '', what it charges)."""


class Spending:
    """Epsilon spent by each site of a run, from the folder's record of releases.

    unit, delta: of the figures. by_site: epsilon, infinite if something left without protection; empty if
    nothing is protected. budget: a site's epsilon in one run; people are told when most of it is spent. None:
    no budget.
    """

    def __init__(self, folder: Path, budget: float | None = None) -> None:
        self.budget = budget
        self.unit, self.delta = "", 0.0
        self.by_site: dict[str, float] = {}
        self._folder = folder
        self._tail = Tail(folder / "releases.jsonl")
        self._times: dict[Release, Counter[str]] = {}
        self._known: dict[frozenset[tuple[Release, int]], float] = {}

    def read(self) -> bool:
        """Read what was released since the last call, and count it; returns whether there was anything."""
        changed = False
        for line in self._tail.read():
            if self._tail.restarted:
                self._times.clear()
                self._tail.restarted = False
            changed |= self._take(line)
        if changed:
            self._count()
        return changed

    def _take(self, line: dict[str, object]) -> bool:
        entries, once = line.get("entries"), line.get("once")
        if not isinstance(entries, list) or not isinstance(once, str):
            return False
        try:
            release = once, tuple(Entry.from_json(entry) for entry in entries)
        except (PrivacyError, TypeError, AttributeError):
            return False
        sites = self._times.setdefault(release, Counter())
        sites.update(texts(line.get("asked")))
        sites.subtract(texts(line.get("refused")))
        return True

    def _count(self) -> None:
        experiment = self._experiment()
        if experiment is None or not experiment.privacy.enabled:
            return
        self.unit, self.delta = experiment.privacy.hidden_unit or "", experiment.privacy.delta
        spent: dict[str, list[tuple[Release, int]]] = {}
        for release, sites in self._times.items():
            for site, times in sites.items():
                if times > 0:
                    spent.setdefault(site, []).append((release, 1 if release[0] else times))
        for site, releases in spent.items():
            key = frozenset(releases)
            if key not in self._known:
                self._known[key] = self._epsilon(key)
            self.by_site[site] = self._known[key]

    def _epsilon(self, releases: frozenset[tuple[Release, int]]) -> float:
        """By Renyi DP, which bounds every accountant's figure from above and answers at once."""
        entries: Counter[Entry] = Counter()
        for (_, charged), times in releases:
            for entry in charged:
                entries[entry] += times
        try:
            return compose(entries, self.delta, "rdp").epsilon
        except (PerennialError, ValueError, OverflowError):
            return math.inf

    def _experiment(self) -> Experiment | None:
        try:
            return load_experiment(self._folder / "experiment.yaml")
        except (PerennialError, OSError):
            return None
