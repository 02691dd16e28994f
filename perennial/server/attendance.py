"""Which sites a round asks, and what a run does while too few are there.

A simulation ends with an error when too few sites serve it, because waiting would bring none back. A deployed
run rests instead, says why and for whom, and goes on when sites are back.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from perennial.config.experiment import Experiment
from perennial.foundation.errors import StateError
from perennial.foundation.streams import stream
from perennial.server.journal import Journal
from perennial.server.roster import Roster

FIRST_REST, LONGEST_REST = 30.0, 900.0
"""Seconds until a run that rests tries again although nobody new came, doubled each time."""
POLL = 0.5


class Attendance:
    """Decides which sites take part in a run, and waits for sites.

    waits_for_sites: whether sites may come back, so that waiting helps. look: called while the run waits; it
    may end the run.
    """

    def __init__(
        self,
        roster: Roster,
        experiment: Experiment,
        journal: Journal,
        waits_for_sites: bool,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.roster = roster
        self.waits_for_sites = waits_for_sites
        self._experiment = experiment
        self._journal = journal
        self._look = look
        self._rest = FIRST_REST

    def wait_for_all(self, expected: int) -> dict[str, int]:
        """Wait for the first sites; returns name -> node id. Raises StateError if too few connect in time."""
        rounds = self._experiment.rounds
        return self._wait(rounds.wait_for or expected)

    def declared_away(self, number: int) -> set[str]:
        """The sites that the experiment itself declares absent in round `number`."""
        return {
            gone.site
            for gone in self._experiment.absence
            if gone.first_round <= number <= (gone.last_round or number)
        }

    def lacks_by_plan(self, number: int) -> bool:
        """Whether sites declared absent, and nothing else, leave round `number` without a quorum."""
        there, quorum = set(self.roster.connected()), self._experiment.rounds.quorum
        return len(there) >= quorum > len(there - self.declared_away(number))

    def available(self, number: int) -> dict[str, int]:
        """name -> node id of the connected sites that are not declared absent in round `number`.

        Waits for a quorum. Raises StateError if none comes and the run does not wait for sites.
        """
        away = self.declared_away(number)
        sites = self.roster.connected()
        while len(sites) < self._experiment.rounds.quorum:
            try:
                sites = self._wait(self._experiment.rounds.quorum)
            except StateError as error:
                if not self.waits_for_sites:
                    raise
                self.rest(str(error))
                sites = self.roster.connected()
        return {site: node for site, node in sites.items() if site not in away}

    def sampled(self, sites: dict[str, int], number: int, attempt: int = 0) -> dict[str, int]:
        """The share of the sites that round `number` asks, in canonical order.

        attempt: how often too few have answered before; each attempt draws anew, so that a site which refuses
        does not hold up the round for ever.
        """
        rounds = self._experiment.rounds
        if rounds.fraction == 1.0:
            return dict(sites)
        count = min(len(sites), max(rounds.quorum, round(rounds.fraction * len(sites))))
        names = list(sites)
        again = (attempt,) if attempt else ()
        generator = stream(self._experiment.seed, "client-sampling", number, *again)
        chosen = sorted(generator.choice(len(names), size=count, replace=False).tolist())
        return {names[index]: sites[names[index]] for index in chosen}

    def rest(self, reason: str, refusing: Mapping[str, str] | None = None) -> None:
        """Pause the run until a new site connects, or for a time that doubles at each rest.

        refusing: site -> why it refused, of connected sites that the run waits for.
        """
        before = set(self.roster.connected())
        why = self.roster.barred() | dict(refusing or {})
        self._journal.write("paused", reason=reason, missing=self.missing(before), refusing=why)
        until, self._rest = time.monotonic() + self._rest, min(2 * self._rest, LONGEST_REST)
        came: set[str] = set()
        while not came and time.monotonic() < until:
            self._look()
            time.sleep(POLL)
            there = set(self.roster.connected())
            came, before = there - before, there
        self._journal.write("went_on", came=sorted(came))

    def served(self) -> None:
        """Note that a round succeeded, so that the next rest is short again."""
        self._rest = FIRST_REST

    def missing(self, sites: Iterable[str]) -> list[str]:
        """Sites of the operator's record that are not connected. sites: those that are."""
        there = {*sites, *self.roster.barred()}
        return [name for name in self.roster.expected() if name not in there]

    def _wait(self, count: int) -> dict[str, int]:
        def say(sites: list[str]) -> None:
            self._look()
            facts = {"connected": sites, "missing": self.missing(sites), "refusing": self.roster.barred()}
            self._journal.write("waiting", need=count, **facts)

        return self.roster.wait(count, self._experiment.rounds.join_seconds, say)
