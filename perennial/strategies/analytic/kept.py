"""Stores the sums of a run: one exact total, and what each site sent, so that it can be withdrawn."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from perennial.config.rounds import (
    LEAST_SITES,
    BoundsConfig,
    compute_parts_by_registration,
    compute_parts_by_share,
)
from perennial.config.rounds import PARTS as UNITS
from perennial.foundation.errors import ConfigError, DataError, StateError
from perennial.learning.analytic.solve import Sums
from perennial.learning.analytic.statistics import (
    EXACT_SAMPLES,
    PARTS,
    Statistics,
    read_statistics_file,
    write_statistics,
)
from perennial.privacy.signed_sums import Signer, Statement
from perennial.strategies.analytic.checks import check_exact

FOLDER = "statistics"
WITHOUT_ASKING = 1 << 35
"""Bytes of sites' sums that are kept without being asked to."""


@dataclass
class KeptSums:
    """The sums of features that a run holds.

    total: over all sites and tasks; None before the first.
    contributions: task -> site -> {sha256, samples, statement}; for sites that gave theirs together under
    masks, sha256 is of the sum and samples is 0. statement: what the site signed, if it signed.
    signers: sites whose keys sign sums, in the order in which they came.
    folder: where each site's own sums are stored; None: nowhere.
    """

    folder: Path | None = None
    total: Statistics | None = None
    contributions: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    signers: list[Signer] = field(default_factory=list)
    _replaced: dict[tuple[int, str], Statistics] = field(default_factory=dict)
    """(task, site) -> sums that stand in place of the file's until keep_again writes them."""

    def add_signers(self, signers: Mapping[str, Signer]) -> tuple[Signer, ...] | None:
        """Append new signers to the list, and return it; None if no site signs."""
        known = {signer.row for signer in self.signers}
        self.signers += [signer for signer in signers.values() if signer.row not in known]
        return tuple(self.signers) if signers else None

    def has(self, task: int, site: str) -> bool:
        return site in self.contributions.get(task, {})

    def add(
        self, task: int, sites: Sequence[str], statistics: Statistics, statement: Statement | None = None
    ) -> None:
        """Add sums of one task to the total. Never call it twice for a site and task: they would count twice.

        sites: one, or those whose sums came as one masked sum, of which nobody knows a single site's.
        statement: the site's signed statement of these sums, if it signs.
        """
        alone = len(sites) == 1
        if self.folder is not None and alone:
            facts: dict[str, Any] = {"site": sites[0], "task": task}
            write_statistics(self.folder / name_file(task, sites[0]), statistics, facts)
        self.total = statistics if self.total is None else self.total + statistics
        facts = {"sha256": statistics.sha256, "samples": statistics.samples if alone else 0}
        if statement is not None:
            facts["statement"] = asdict(statement)
        self.contributions.setdefault(task, {}).update(dict.fromkeys(sites, facts))

    def take_back(self, site: str) -> Statistics:
        """Subtract everything that a site sent, and forget it; returns what was subtracted.

        Raises StateError if its own sums were not kept, or are not those that it gave.
        """
        gone = None
        for task in self.list_contributions(site):
            statistics = self.read_own_sums(task, site)
            gone = statistics if gone is None else gone + statistics
        if gone is None or self.total is None:
            raise StateError(f"site {site!r}: its sums are in no task of this run")
        self.total = self.total - gone
        self.contributions = {
            task: {name: facts for name, facts in sites.items() if name != site}
            for task, sites in self.contributions.items()
        }
        return gone

    @property
    def number(self) -> int:
        """Number of samples of all sites and tasks."""
        return 0 if self.total is None else self.total.samples

    @property
    def sites(self) -> list[str]:
        """Names of the sites whose sums are there, sorted."""
        return sorted({site for sites in self.contributions.values() for site in sites})

    def of_site(self, site: str, classes: range) -> Statistics | None:
        """A site's own sums over all tasks; None if it gave none. Raises StateError as kept() does."""
        parts = [self.read_own_sums(task, site).over(classes) for task in self.list_contributions(site)]
        return reduce(operator.add, parts) if parts else None

    def list_contributions(self, site: str) -> dict[int, dict[str, Any]]:
        """task -> {sha256, samples, statement} of the sums that a site gave."""
        return {task: sites[site] for task, sites in sorted(self.contributions.items()) if site in sites}

    def read_own_sums(self, task: int, site: str) -> Statistics:
        """A site's own sums of one task, as the total has them.

        Raises StateError if they were not kept, or if the file holds others than the total.
        """
        if self.folder is None:
            raise StateError("strategy.keep_sites is false: no site's own sums were kept")
        if (task, site) in self._replaced:
            return self._replaced[task, site]
        statistics, _ = read_statistics_file(self.folder / name_file(task, site))
        if statistics.sha256 != self.contributions[task][site]["sha256"]:
            raise StateError(f"{name_file(task, site)}: not the sums that {site} gave in task {task}")
        return statistics

    def subtract_group(self, site: str, group: Mapping[int, Statistics]) -> dict[int, Statistics]:
        """task -> a site's own sums without those of `group`, some of its records, by task.

        Raises StateError if the site gave no such sums, or others than were kept; ProtocolError if no
        samples have the sums of the group, or of what would be left.
        """
        remaining = {}
        for task, part in sorted(group.items()):
            if site not in self.contributions.get(task, {}):
                raise StateError(f"site {site!r}: its sums are not in task {task} of this run")
            own = self.read_own_sums(task, site)
            if own.classes != part.classes or own.width != part.width:
                raise StateError(f"task {task}: the group's sums are of other classes or features")
            check_exact(part)
            remaining[task] = own - part
            check_exact(remaining[task])
        return remaining

    def replace(
        self, site: str, remaining: Mapping[int, Statistics], statements: Mapping[int, Statement]
    ) -> None:
        """Replace a site's sums and statements, by task. The files stay until keep_again."""
        for task, statistics in remaining.items():
            assert self.total is not None
            self.total = self.total - self.read_own_sums(task, site) + statistics
            facts = {"sha256": statistics.sha256, "samples": statistics.samples}
            self.contributions[task][site] = facts | {"statement": asdict(statements[task])}
            self._replaced[task, site] = statistics

    def keep_again(self, site: str, group: Mapping[int, Statistics]) -> None:
        """Subtract a group's sums from the site's files, unless that was done already."""
        assert self.folder is not None
        for task, part in group.items():
            statistics, facts = read_statistics_file(self.folder / name_file(task, site))
            if statistics.sha256 != self.contributions[task][site]["sha256"]:
                write_statistics(self.folder / name_file(task, site), statistics - part, facts)
            self._replaced.pop((task, site), None)

    def limit_to_task(self, task: int) -> "KeptSums":
        """The sums of tasks up to this one: these, or if they include later tasks, from the kept files."""
        if not any(sites for number, sites in self.contributions.items() if number > task):
            return self
        found = KeptSums(self.folder, _replaced=self._replaced)
        for number, sites in sorted(self.contributions.items()):
            for site in sites if number <= task else ():
                statistics = self.read_own_sums(number, site)
                found.total = statistics if found.total is None else found.total + statistics
                found.contributions.setdefault(number, {})[site] = sites[site]
        return found

    def samples(self, site: str) -> int:
        """Number of the site's samples over all tasks."""
        return sum(sites[site]["samples"] for sites in self.contributions.values() if site in sites)

    def state(self, name: str) -> dict[str, Any]:
        """Tensors and JSON-able values with keys that begin with `name`, which load() restores."""
        state: dict[str, Any] = {
            f"{name}-given": {str(task): sites for task, sites in self.contributions.items()},
            f"{name}-signers": [astuple(signer) for signer in self.signers],
        }
        if self.total is not None:
            state |= {f"{name}-{part}": getattr(self.total, part) for part in PARTS}
            state[f"{name}-classes"] = [self.total.classes.start, self.total.classes.stop]
        return state

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Restore what state() returned for the same name."""
        given = state.get(f"{name}-given", {})
        self.contributions = {int(task): dict(sites) for task, sites in given.items()}
        self.signers = [Signer(*row) for row in state.get(f"{name}-signers", ())]
        self.total = None
        if f"{name}-classes" in state:
            gram, sums, counts = (state[f"{name}-{part}"].cpu() for part in PARTS)
            first, end = state[f"{name}-classes"]
            self.total = Statistics(gram, sums, counts, range(first, end))


def require_room(kept: int) -> None:
    """Raise ConfigError if `kept`, the bytes of all sites' sums, is more than is stored without asking."""
    if kept > WITHOUT_ASKING:
        raise ConfigError(
            f"strategy.keep_sites: the sums of all sites and tasks would take {kept / 1e9:.0f} GB of the "
            f"server's disk, more than {WITHOUT_ASKING / 1e9:.0f} GB; set it to false, and no site can be "
            "withdrawn without its help"
        )


def name_file(task: int, site: str) -> str:
    """Name of the file with a site's sums of one task, in a run's folder of statistics."""
    return f"{site}-task-{task:04d}.safetensors"


def find_files(folder: Path, site: str) -> list[Path]:
    """A site's files of sums in a run's folder of statistics, not those of one whose name begins like it."""
    named = re.compile(re.escape(site) + r"-task-\d{4,}\.safetensors")
    return [path for path in folder.glob("*.safetensors") if named.fullmatch(path.name)]


def require_own_sums(bounds: BoundsConfig, own: bool) -> None:
    """Raise ConfigError if bounds limit influence but the server lacks each site's own plain sums."""
    if (bounds.share or bounds.registered) and not own:
        raise ConfigError(
            "bounds.share, bounds.registered: each site's own sums are cut when the head is solved for; "
            "allowed with keep_sites and head gaussian or ridge, without privacy and without secure"
        )


def compute_parts(kept: KeptSums, bounds: BoundsConfig) -> dict[tuple[int, str], int]:
    """(task, site) -> weight of its sums in units of 1/UNITS; sums of full weight are left out."""
    given = kept.contributions
    registered = compute_parts_by_registration(
        {site: kept.samples(site) for site in kept.sites}, bounds.registered
    )
    found = {}
    for task, of_task in given.items():
        names = sorted(of_task)
        counts = [of_task[site]["samples"] * registered[site] // UNITS for site in names]
        parts = [UNITS] * len(names)
        if bounds.share is not None and len(names) >= LEAST_SITES:
            parts = compute_parts_by_share(counts, bounds.share)
        for site, part in zip(names, parts, strict=True):
            if (cut := max(1, registered[site] * part // UNITS)) < UNITS:
                found[task, site] = cut
    return found


def combine_sums(kept: KeptSums, bounds: BoundsConfig, classes: range) -> Sums:
    """The total of the kept sums, weighted as compute_parts() says, with rows for these classes.

    Raises DataError if there are no sums, or more samples than weighted ones stay exact for; StateError
    if a site's own sums were not kept.
    """
    if kept.total is None:
        raise DataError("no site has sent sums yet")
    cut = compute_parts(kept, bounds)
    if not cut:
        return Sums.of(kept.total.over(classes))
    if kept.total.samples >= EXACT_SAMPLES:
        raise DataError(
            f"bounds.share, bounds.registered: found {kept.total.samples} samples; allowed fewer than 2^20"
        )
    total = _scale(kept.total, UNITS)
    for (task, site), parts in sorted(cut.items()):
        total = total - _scale(kept.read_own_sums(task, site), UNITS - parts)
    sums = Sums.of(total.over(classes))
    return Sums(sums.gram.div_(UNITS), sums.sums / UNITS, sums.counts / UNITS)


def _scale(found: Statistics, times: int) -> Statistics:
    return Statistics(found.gram * times, found.sums * times, found.counts * times, found.classes)
