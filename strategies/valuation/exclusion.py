"""Whether flagged sites may be excluded: only where honest sites are known to be flagged rarely.

How often that happens depends on how many sites there are and on how much their classes differ. Both were
varied in benchmarks/detection_fairness.py; a federation outside what it measured, or at which more honest
sites may have been flagged than MOST, gets reports alone. The server learns of the federation what sites say
of their labels with each turn. One that lies about its own moves the median over sites a little, and cannot
make a federation of very different sites look alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perennial.foundation.errors import ConfigError
from perennial.strategies.round.run_context import RunContext

FALSE_ALARM, LEAST_SWEEPS, NORM_MULTIPLE = 0.01, 5, 3.0
"""Settings of the runs that were counted; stricter ones flag fewer sites."""
MOST = 0.01
"""Share of honest sites wrongly flagged above which nobody is excluded."""


@dataclass(frozen=True)
class Measured:
    """A federation whose runs were counted.

    increments: whether classes came in several tasks.
    heterogeneity: as below, the mean over its runs.
    at_most: one-sided 95 % bound (Clopper and Pearson) on the share of honest sites wrongly flagged.
    """

    sites: int
    increments: bool
    heterogeneity: float
    at_most: float


MEASURED: tuple[Measured, ...] = (
    Measured(8, False, 0.2964, 0.0093),
    Measured(8, False, 0.442, 0.0093),
    Measured(8, False, 0.5433, 0.0093),
    Measured(8, False, 0.6677, 0.0093),
    Measured(20, False, 0.3286, 0.0087),
    Measured(20, False, 0.4537, 0.0087),
    Measured(20, False, 0.5478, 0.0087),
    Measured(20, False, 0.7048, 0.0087),
    Measured(8, True, 0.2436, 0.0093),
    Measured(8, True, 0.3333, 0.0093),
    Measured(8, True, 0.4319, 0.0093),
    Measured(8, True, 0.6085, 0.0093),
    Measured(20, True, 0.3028, 0.0087),
    Measured(20, True, 0.4196, 0.0087),
    Measured(20, True, 0.48, 0.0087),
    Measured(20, True, 0.6687, 0.0087),
    Measured(8, False, 0.2964, 0.0093),
    Measured(8, False, 0.5433, 0.0093),
    Measured(8, False, 0.6677, 0.0093),
)
"""From benchmarks/results/detection_fairness.jsonl; tests/strategies/test_exclusion.py compares."""


def heterogeneity(counts: Sequence[Sequence[int]]) -> float:
    """How much the classes of sites differ, from 0 (all alike) to almost 1 (no class at two sites).

    The median over sites of the total variation distance between a site's shares of the classes and the mean
    of all sites' shares, each site counting alike.

    counts: (n, M) samples of each class at each site; n at least 1, and no site without any sample.
    """
    held = np.asarray(counts, dtype=np.float64)
    shares = held / held.sum(axis=1, keepdims=True)
    return float(np.median(np.abs(shares - shares.mean(axis=0)).sum(axis=1) / 2))


def size_refusal(sites: int, *, increments: bool) -> str:
    """Why nobody may be excluded among so many sites, whatever their data; '' if it depends on these."""
    measured = [cell.sites for cell in MEASURED if cell.increments == increments]
    tasks = "several tasks" if increments else "one task"
    if not measured:
        return f"found {tasks}; wrong accusations were not counted in such runs"
    least, most = min(measured), max(measured)
    if least <= sites <= most:
        return ""
    return (
        f"found {sites} sites; allowed {least} to {most}, among which wrong accusations were counted in runs "
        f"of {tasks}"
    )


def require_measured_settings(
    estimator: str, utility: str | None, false_alarm: float, least_sweeps: int
) -> None:
    """Raises ValueError if sites would be flagged by another rule than the one that was measured."""
    words = "whose share of wrongly flagged sites has been measured (docs/robustness.md)"
    if estimator != "online":
        raise ValueError(
            f"on_flag: found 'exclude' with estimator {estimator!r}; allowed with 'online', {words}"
        )
    if utility == "accuracy":
        raise ValueError(
            f"on_flag: found 'exclude' with utility 'accuracy'; allowed with 'probability', {words}"
        )
    if false_alarm > FALSE_ALARM or least_sweeps < LEAST_SWEEPS:
        raise ValueError(
            f"on_flag: found 'exclude' with false_alarm {false_alarm:g} and least_sweeps {least_sweeps}; "
            f"allowed with at most {FALSE_ALARM:g} and at least {LEAST_SWEEPS}, {words}"
        )


def require_measured_federation(services: RunContext) -> None:
    """Raises ConfigError if it is known before the first round that nobody may be excluded."""
    experiment, why = services.experiment, ""
    if experiment.privacy.mode != "none":
        why = "found privacy, under which sites tell no label counts and nobody is tested for harm"
    elif services.judge is None:
        why = "found no held-out samples at the server; what sites measure was not counted"
    elif (multiple := experiment.bounds.norm_multiple) is not None and multiple < NORM_MULTIPLE:
        why = (
            f"found bounds.norm_multiple {multiple:g}, whose wrong accusations were not counted; "
            f"allowed {NORM_MULTIPLE:g} and more"
        )
    elif experiment.data.sites is not None:
        why = size_refusal(experiment.data.sites, increments=services.schedule.count > 1)
    if why:
        raise ConfigError(f"strategy.on_flag exclude: {why} (docs/robustness.md)")


@dataclass
class FederationShape:
    """What the server knows of the sites' classes: what each has said with its turns."""

    _counts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, site: str, held: Sequence[int | None]) -> None:
        """One turn. held: samples of each class that the site trained on; None for one that it withholds."""
        known = self._counts.setdefault(site, [])
        known += [0] * (len(held) - len(known))
        for label, count in enumerate(held):
            known[label] += count or 0

    @property
    def heterogeneity(self) -> float | None:
        """Of the sites that have told their label counts so far; None: nobody has."""
        told = self._told()
        width = max(map(len, told), default=0)
        return heterogeneity([[*counts, *[0] * (width - len(counts))] for counts in told]) if told else None

    def _told(self) -> list[list[int]]:
        return [counts for counts in self._counts.values() if any(counts)]

    def refusal(self, sites: int, *, increments: bool) -> str:
        """Why nobody may be excluded; '' if flagged sites may be.

        sites: number of sites of the federation. increments: whether classes come in several tasks.
        """
        told, found = len(self._told()), self.heterogeneity
        if found is None or 2 * told <= sites:
            return (
                f"{told} of {sites} sites have told their label counts; allowed with more than half of them"
            )
        if refused := size_refusal(sites, increments=increments):
            return refused
        measured = [cell for cell in MEASURED if cell.increments == increments]
        fewer = max(cell.sites for cell in measured if cell.sites <= sites)
        more = min(cell.sites for cell in measured if cell.sites >= sites)
        for number in sorted({fewer, more}):
            most = _rate([cell for cell in measured if cell.sites == number], found)
            if most is None:
                return (
                    f"the sites' classes differ by {found:.2f}, more than in any federation of {number} "
                    "sites in which wrong accusations were counted"
                )
            if most > MOST:
                return (
                    f"of {number} sites whose classes differ by up to {found:.2f}, {most:.1%} of the honest "
                    f"ones may be flagged; allowed up to {MOST:.0%}"
                )
        return ""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = {site: list(counts) for site, counts in state.items()}


def _rate(cells: Sequence[Measured], found: float) -> float | None:
    """The largest rate of the cells up to the first whose sites differ at least as much; None: none do."""
    ordered = sorted(cells, key=lambda cell: (cell.heterogeneity, -cell.at_most))
    for number, cell in enumerate(ordered, start=1):
        if cell.heterogeneity >= found:
            return max(cell.at_most for cell in ordered[:number])
    return None
