"""Which sites are flagged: for harm, for no gain, for updates above the norm bound, or null updates."""

from collections.abc import Sequence
from typing import Any

from perennial.data.schedule import TaskSchedule
from perennial.strategies.valuation.exclusion import FederationShape
from perennial.strategies.valuation.harm import HarmTest
from perennial.strategies.valuation.sweeps import ValuedTurn


class Flags:
    """The flags of a run, from what each of a site's updates was.

    false_alarm: probability that an honest site is ever flagged for harm.
    least_sweeps: updates after which a site whose every update was zero is flagged.
    excludes: whether flagged sites are excluded, where valuation/exclusion.py allows it.
    """

    def __init__(self, false_alarm: float, least_sweeps: int, *, excludes: bool) -> None:
        self.least_sweeps = least_sweeps
        self.flags: dict[str, str] = {}
        """site -> why it is flagged, in a word or two."""
        self.excluded: list[str] = []
        """Sites that are asked no more, and keep their flag."""
        self.federation = FederationShape()
        self._excludes, self._refused = excludes, ""
        self._harm = HarmTest(false_alarm)
        self._zero: dict[str, list[int]] = {}

    def add_update(self, site: str, *, zero: bool, scaled: bool, held: Sequence[int | None] = ()) -> None:
        """One update.

        zero: nothing changed. scaled: the norm bound scaled it down. held: samples of each class that the
        site trained on; None for a class that it withholds.
        """
        self.federation.add(site, held)
        self._harm.add_norm(site, scaled)
        counts = self._zero.setdefault(site, [0, 0])
        counts[0] += zero
        counts[1] += 1

    def add_sweep(self, sweep: Sequence[ValuedTurn]) -> None:
        """The turns of one sweep of a ring."""
        self._harm.add(sweep)

    def behind(self, site: str) -> float | None:
        """Share of a site's turns that did far less for its own classes than the others' turns for theirs."""
        return self._harm.behind(site)

    def update(self, schedule: TaskSchedule, sites: int) -> list[str]:
        """Flag sites anew from all that was added, and exclude them if that is wanted and allowed.

        sites: number of sites of the federation.
        Returns a sentence for each site that is newly flagged, and one for a new reason to exclude nobody.
        """
        accused = self._harm.accused()
        flags = {site: self.flags[site] for site in self.excluded}
        flags |= {site: accusation.flag for site, accusation in accused.items()}
        flags |= {
            site: "null update"
            for site, (zero, updates) in self._zero.items()
            if updates >= self.least_sweeps and zero == updates
        }
        new = sorted(flags.keys() - self.flags.keys())
        self.flags = flags
        reasons = {
            site: accused[site].why if site in accused else "every update it sent was zero" for site in new
        }
        sentences = [f"site {site}: flagged ({flags[site]}): {why}" for site, why in reasons.items()]
        return sentences + self._exclude(sites, increments=schedule.count > 1)

    def _exclude(self, sites: int, *, increments: bool) -> list[str]:
        if not self._excludes or self.flags.keys() <= set(self.excluded):
            return []
        refused, former = self.federation.refusal(sites, increments=increments), self._refused
        self._refused = refused
        if refused:
            named = f"strategy.on_flag exclude: flagged sites are still asked: {refused}"
            return [named] if refused != former else []
        self.excluded = sorted(self.flags)
        return []

    def state_dict(self) -> dict[str, Any]:
        return {
            "null": self._zero,
            "harm": self._harm.state_dict(),
            "flags": self.flags,
            "excluded": self.excluded,
            "exclusion_refused": self._refused,
            "federation": self.federation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._zero, self.flags, self.excluded = state["null"], state["flags"], state["excluded"]
        self._refused = state["exclusion_refused"]
        self.federation.load_state_dict(state["federation"])
        self._harm.load_state_dict(state["harm"])
