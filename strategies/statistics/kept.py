"""The sums of a run: one exact total, and what each site gave, so that it can be taken back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.learning.analytic.statistics import Statistics

FOLDER = "statistics"
PARTS = ("gram", "sums", "counts")


@dataclass
class KeptSums:
    """total: over all sites and tasks; None before the first. given: task -> site -> {sha256, samples}; of
    sites that gave theirs together, sha256 is of the sum and samples is 0.

    folder: where each site's own sums are kept; None: nowhere.
    """

    folder: Path | None = None
    total: Statistics | None = None
    given: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def has(self, task: int, site: str) -> bool:
        return site in self.given.get(task, {})

    def add(self, task: int, site: str, statistics: Statistics) -> None:
        """Take in one site's sums of one task, once."""
        if self.folder is not None:
            write_statistics(self.folder / file_name(task, site), statistics, {"site": site, "task": task})
        self._take(statistics)
        facts = {"sha256": statistics.sha256, "samples": statistics.samples}
        self.given.setdefault(task, {})[site] = facts

    def add_cohort(self, task: int, sites: Sequence[str], statistics: Statistics) -> None:
        """Take in the sums of sites that gave them together, under masks; nobody knows one site's part."""
        self._take(statistics)
        facts = {"sha256": statistics.sha256, "samples": 0, "together": len(sites)}
        self.given.setdefault(task, {}).update(dict.fromkeys(sites, facts))

    def _take(self, statistics: Statistics) -> None:
        self.total = statistics if self.total is None else self.total + statistics

    def take_back(self, site: str) -> Statistics:
        """Subtract everything that a site gave, and forget that it did; returns what was subtracted.

        Raises StateError where its own sums were not kept, or are not those that it gave.
        """
        gone = None
        for task, facts in self.given_by(site).items():
            statistics = self.kept(task, site)
            if statistics.sha256 != facts["sha256"]:
                raise StateError(f"{file_name(task, site)}: not the sums that {site} gave in task {task}")
            gone = statistics if gone is None else gone + statistics
        if gone is None or self.total is None:
            raise StateError(f"site {site!r}: its sums are in no task of this run")
        self.total = self.total - gone
        self.given = {
            task: {name: facts for name, facts in sites.items() if name != site}
            for task, sites in self.given.items()
        }
        return gone

    def given_by(self, site: str) -> dict[int, dict[str, Any]]:
        """task -> {sha256, samples} of what a site gave."""
        return {task: sites[site] for task, sites in sorted(self.given.items()) if site in sites}

    def kept(self, task: int, site: str) -> Statistics:
        """One site's own sums of one task. Raises StateError where they were not kept."""
        if self.folder is None:
            raise StateError("strategy.keep_sites is false: no site's own sums were kept")
        return read_kept(self.folder / file_name(task, site))[0]

    def forget_task(self, task: int, total: Statistics | None) -> None:
        """What was given for a task no longer counts; total: of the others."""
        self.given.pop(task, None)
        self.total = total

    def samples(self, site: str) -> int:
        """The site's samples of all tasks."""
        return sum(sites[site]["samples"] for sites in self.given.values() if site in sites)

    def state(self, name: str) -> dict[str, Any]:
        """As load takes it: tensors and JSON-able values."""
        state: dict[str, Any] = {f"{name}-given": {str(task): sites for task, sites in self.given.items()}}
        if self.total is not None:
            state |= {f"{name}-{part}": getattr(self.total, part) for part in PARTS}
            state[f"{name}-classes"] = [self.total.classes.start, self.total.classes.stop]
        return state

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Restore state()."""
        given = state.get(f"{name}-given", {})
        self.given = {int(task): dict(sites) for task, sites in given.items()}
        self.total = None
        if f"{name}-classes" in state:
            gram, sums, counts = (state[f"{name}-{part}"].cpu() for part in PARTS)
            first, end = state[f"{name}-classes"]
            self.total = Statistics(gram, sums, counts, range(first, end))


def file_name(task: int, site: str) -> str:
    """Of one site's sums of one task, in a run's folder of statistics."""
    return f"{site}-task-{task:04d}.safetensors"


def write_statistics(path: Path, statistics: Statistics, facts: dict[str, Any]) -> None:
    """Keep statistics, whole or not at all."""
    make_folder(path.parent)
    tensors: dict[str, Tensor] = {part: getattr(statistics, part).contiguous() for part in PARTS}
    about = {**facts, "classes": [statistics.classes.start, statistics.classes.stop]}
    replace_file(path, save(tensors, {"facts": json.dumps(about)}))


def read_kept(path: Path) -> tuple[Statistics, dict[str, Any]]:
    """(statistics, facts) of a file. Raises StateError naming it when it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            gram, sums, counts = (file.get_tensor(part) for part in PARTS)
            facts = json.loads((file.metadata() or {})["facts"])
        first, end = facts["classes"]
        return Statistics(gram, sums, counts, range(first, end)), facts
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path}: missing or damaged ({error})") from error
