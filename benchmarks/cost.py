"""How long a table's missing runs will take, before they start."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grid import Job, finished, jobs, read_results
from benchmarks.table import Table
from benchmarks.training_cost import TrainingCost, training_cost


@dataclass(frozen=True)
class Cost:
    """What the missing runs of a table cost.

    missing: runs to do.
    seconds: of one process doing them all.
    measured: how many of them are judged by runs of the same row; the others are judged by their number of
    samples and a few timed batches.
    operations: of those others, floating-point operations of training.
    """

    missing: int
    seconds: float
    measured: int
    operations: float = 0.0

    def sentence(self, workers: int) -> str:
        """For the operator."""
        if not self.missing:
            return "nothing to run; every result is there"
        guess = ""
        if self.measured < self.missing:
            guess = f" (training alone, where a row was never run: {self.operations:.2g} operations)"
        return (
            f"{self.missing} runs, about {duration(self.seconds / workers)} with {workers} at a time{guess}"
        )


def cost(table: Table, results: Path, device: str) -> Cost:
    """The cost of what is missing of a table. Raises DataError where its data is missing."""
    known = read_results(results)
    done = finished(table, results)
    missing = [job for job in jobs(table) if job not in done]
    seconds = {
        job.row.label: [run["seconds"] for run in known if run["row"] == job.row.label] for job in missing
    }
    measured = [job for job in missing if seconds[job.row.label]]
    known_seconds = sum(statistics.mean(seconds[job.row.label]) for job in measured)
    predicted = _predicted(missing, seconds, device)
    return Cost(
        len(missing),
        known_seconds + sum(each.seconds for each in predicted),
        len(measured),
        sum(each.operations for each in predicted),
    )


def _predicted(missing: Sequence[Job], known: Mapping[str, list[float]], device: str) -> list[TrainingCost]:
    """Of each missing run whose row was never run; the seeds of a row cost the same."""
    each: dict[str, TrainingCost] = {}
    unknown = [job for job in missing if not known[job.row.label]]
    for job in unknown:
        if job.row.label not in each:
            each[job.row.label] = training_cost(job.row.load(job.seed), device)
    return [each[job.row.label] for job in unknown]


def duration(seconds: float) -> str:
    """For people: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
