"""Computes an upper bound on the privacy that each site has spent in a run that goes on."""

import math
from collections import Counter
from pathlib import Path

from perennial.config.experiment import load_experiment
from perennial.foundation.errors import PerennialError
from perennial.privacy.composition import compose
from perennial.privacy.entries import Entry
from perennial.server.releases import Releases


class Spending:
    """Epsilon spent by each site of a run, from the folder's record of releases.

    unit, delta: of the figures. by_site: epsilon, infinite if something left without protection; empty if
    nothing is protected, or if the record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.unit, self.delta = "", 0.0
        self.by_site: dict[str, float] = {}
        self._folder, self._releases = folder, Releases(folder)
        self._size = 0
        self._known: dict[frozenset[tuple[Entry, int]], float] = {}

    def read(self) -> None:
        """Count again if something was released since the last call."""
        try:
            size = self._releases.path.stat().st_size
            if size == self._size:
                return
            self._size = size
            privacy = load_experiment(self._folder / "experiment.yaml").privacy
            charged = self._releases.charged()
        except (PerennialError, OSError):
            self.by_site = {}
            return
        if privacy.enabled:
            self.unit, self.delta = privacy.hidden_unit or "", privacy.delta
            self.by_site = {site: self._epsilon(entries) for site, entries in charged.items() if entries}

    def _epsilon(self, entries: list[Entry]) -> float:
        """By Renyi DP, which bounds every accountant's figure from above and answers at once."""
        counted = Counter(entries)
        key = frozenset(counted.items())
        if key not in self._known:
            try:
                self._known[key] = compose(counted, self.delta, "rdp").epsilon
            except (PerennialError, ValueError, OverflowError):
                self._known[key] = math.inf
        return self._known[key]
