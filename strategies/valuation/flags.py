"""Which sites are flagged, for harm, for updates above the norm bound or for updates of zero."""

from collections.abc import Sequence
from typing import Any

from perennial.strategies.valuation.harm import HarmTest


class Flags:
    """The flags of a run, from what each of a site's updates was.

    false_alarm: probability that an honest site is ever flagged for harm.
    least_sweeps: updates after which a site whose every update was zero is flagged.
    """

    def __init__(self, false_alarm: float, least_sweeps: int) -> None:
        self.least_sweeps = least_sweeps
        self.flags: dict[str, str] = {}
        """site -> why it is flagged, in a word or two."""
        self._harm = HarmTest(false_alarm)
        self._zero: dict[str, list[int]] = {}

    def add_update(self, site: str, *, zero: bool, scaled: bool) -> None:
        """One update. zero: nothing changed. scaled: the norm bound scaled it down."""
        self._harm.add_norm(site, scaled)
        counts = self._zero.setdefault(site, [0, 0])
        counts[0] += zero
        counts[1] += 1

    def add_turn(self, site: str, held: Sequence[int | None], change: Sequence[float | None]) -> None:
        """One turn of a ring; held and change as in HarmTest.add."""
        self._harm.add(site, held, change)

    def update(self, classes: int, kept: Sequence[str]) -> list[str]:
        """Flag sites anew from all that was added; returns a sentence for each site that is newly flagged.

        classes: number of classes of the run.
        kept: sites that keep their flag, since nobody asks them for updates any more.
        """
        accused = self._harm.accused(classes)
        flags = {site: self.flags[site] for site in kept}
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
        return [f"site {site}: flagged ({flags[site]}): {why}" for site, why in reasons.items()]

    def state_dict(self) -> dict[str, Any]:
        return {"null": self._zero, "harm": self._harm.state_dict(), "flags": self.flags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._zero, self.flags = state["null"], state["flags"]
        self._harm.load_state_dict(state["harm"])
