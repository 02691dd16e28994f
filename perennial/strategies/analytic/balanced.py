"""Class-balanced sums: every class counts 1 / n_c, so sites report their counts before their sums.

Counts stand beside sums or nowhere: those of a site that then sends none count for nothing, and take no class
away from the others.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from perennial.learning.analytic.statistics import WEIGHT, Statistics
from perennial.strategies.analytic.kept import KeptSums
from perennial.strategies.analytic.statistics_round import StatisticsRound

Counts = dict[str, list[int]]
"""site -> its samples of each of a task's classes."""


def compute_class_weights(counts: Mapping[str, list[int]], classes: range) -> list[int]:
    """The weight of one sample of each class, in steps of 2^-20; 0 for a class that nobody holds."""
    totals = [sum(row[place] for row in counts.values()) for place in range(len(classes))]
    return [round(WEIGHT / total) if total else 0 for total in totals]


@dataclass
class BalancedSums:
    """For each task: the collected sums, the counts of the sites that sent them, and the classes' weights."""

    kept: dict[int, KeptSums] = field(default_factory=dict)
    counts: dict[int, Counts] = field(default_factory=dict)
    weights: dict[int, list[int]] = field(default_factory=dict)

    def collect(self, asking: StatisticsRound, task: int, classes: range) -> None:
        """Ask for the missing sums of a task; all sites are asked again if its classes' weights change.

        While a site that sent sums is away, others join with the weights that all would have, and its own
        stay as they are: no class is lost, and none counts more than twice as much as another.
        """
        counts = self.counts.setdefault(task, {})
        here = asking.request.sites
        missing = [site for site in here if site not in counts]
        told = asking.ask_class_counts(missing, task, classes) if missing else {}
        away = counts.keys() - set(here)
        exact = compute_class_weights(counts | told, classes)
        if not told and (away or exact == self.weights.get(task)):
            return
        if not away and self._ask_all(asking, task, classes, counts | told):
            return
        joined = {site: row for site, row in told.items() if site not in asking.failed}
        if joined:
            self._joined(asking, task, classes, joined)

    def _ask_all(self, asking: StatisticsRound, task: int, classes: range, counts: Counts) -> bool:
        """Whether every site that counts sent sums with the weights of all, which then stand.

        False where one that had sent its sums before does not send them now: those stay as they are.
        """
        before = self.counts[task]
        while counts:
            weights = compute_class_weights(counts, classes)
            if counts.keys() == before.keys() and weights == self.weights.get(task):
                return True
            fresh = self._sent(asking, task, classes, counts, weights)
            gone = counts.keys() - fresh.contributions.get(task, {}).keys()
            if not gone:
                self.kept[task], self.counts[task], self.weights[task] = fresh, counts, weights
                return True
            asking.outcome.warnings.append(
                f"task {task}: {', '.join(sorted(gone)[:5])} told counts and sent no sums; the counts are "
                "dropped with them"
            )
            if gone & before.keys():
                return False
            counts = {site: row for site, row in counts.items() if site not in gone}
        return True

    def _joined(self, asking: StatisticsRound, task: int, classes: range, told: Counts) -> None:
        """Sums of sites that come while others are away, with the weights that all together would have."""
        weights = compute_class_weights(self.counts[task] | told, classes)
        kept = self.kept.setdefault(task, KeptSums())
        for site, statistics in asking.ask_statistics(list(told), task, classes, weights):
            if self._admit_sums(asking, site, statistics, told[site], weights):
                kept.add(task, [site], statistics)
                self.counts[task][site] = told[site]
        # a class counts between once and twice now; once, when all are there and asked again
        self.weights.pop(task, None)
        asking.outcome.warnings.append(
            f"task {task}: its classes do not all count alike until every site that sent sums answers again"
        )

    def _sent(
        self, asking: StatisticsRound, task: int, classes: range, counts: Counts, weights: list[int]
    ) -> KeptSums:
        fresh = KeptSums()
        for site, statistics in asking.ask_statistics(list(counts), task, classes, weights):
            if self._admit_sums(asking, site, statistics, counts[site], weights):
                fresh.add(task, [site], statistics)
        return fresh

    @staticmethod
    def _admit_sums(
        asking: StatisticsRound, site: str, statistics: Statistics, told: list[int], weights: list[int]
    ) -> bool:
        """Whether sums are of no more samples than the site told; else it is dropped by name."""
        most = [count * weight for count, weight in zip(told, weights, strict=True)]
        fits = all(count <= limit for count, limit in zip(statistics.counts.tolist(), most, strict=True))
        if not fits:
            asking.drop_site(site, "StatisticsReply: statistics: counts: more samples than the site had told")
        return fits

    def has(self, task: int, site: str) -> bool:
        return task in self.kept and self.kept[task].has(task, site)

    @property
    def number(self) -> int:
        """Number of samples of all sites and tasks, which weighted sums do not say."""
        return sum(sum(row) for counts in self.counts.values() for row in counts.values())

    @property
    def total(self) -> Statistics | None:
        """The sums over all tasks; None before the first."""
        totals = [kept.total for _, kept in sorted(self.kept.items()) if kept.total is not None]
        return reduce(operator.add, totals) if totals else None

    def samples(self, site: str) -> int:
        """Number of the site's samples over all tasks."""
        return sum(sum(counts.get(site, ())) for counts in self.counts.values())

    @property
    def sites(self) -> list[str]:
        """Names of the sites whose sums are there, sorted."""
        return sorted({site for counts in self.counts.values() for site in counts})

    def state(self) -> dict[str, Any]:
        """Tensors and JSON-able values, which load() restores."""
        state: dict[str, Any] = {"balanced": sorted(self.kept)}
        for task, kept in self.kept.items():
            state |= kept.state(f"task-{task}")
        state["counts"] = {str(task): counts for task, counts in self.counts.items()}
        state["class_weights"] = {str(task): weights for task, weights in self.weights.items()}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        self.kept = {task: KeptSums() for task in state["balanced"]}
        for task, kept in self.kept.items():
            kept.load(f"task-{task}", state)
        self.counts = {int(task): dict(counts) for task, counts in state["counts"].items()}
        self.weights = {int(task): list(weights) for task, weights in state["class_weights"].items()}
