"""How long a table's missing runs will take, before they start."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.grid import Job, finished, jobs, read_results
from benchmarks.table import Table
from client.workbench import choose_device
from config.experiment import Experiment
from config.simulation import simulated_federation
from models.registry import build_model

TIMED_BATCHES = 3


@dataclass(frozen=True)
class Cost:
    """missing: runs to do. seconds: of one process doing them all. measured: how many of them are judged by
    runs of the same row; the others by their number of samples and a few timed batches."""

    missing: int
    seconds: float
    measured: int

    def sentence(self, workers: int) -> str:
        """For the operator."""
        if not self.missing:
            return "nothing to run; every result is there"
        guess = "" if self.measured == self.missing else " (training alone, where a row was never run)"
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
    total = sum(statistics.mean(seconds[job.row.label]) for job in measured)
    return Cost(len(missing), total + _predicted(missing, seconds, device), len(measured))


def _predicted(missing: Sequence[Job], known: dict[str, list[float]], device: str) -> float:
    each: dict[str, float] = {}
    total = 0.0
    for job in missing:
        if not known[job.row.label]:
            if job.row.label not in each:
                each[job.row.label] = training_seconds(job.row.load(job.seed), device)
            total += each[job.row.label]
    return total


def training_seconds(experiment: Experiment, device: str) -> float:
    """Local training of a whole run in one process, from a few timed batches; no exchange, no evaluation."""
    federation = simulated_federation(experiment)
    schedule = federation.registry.schedule
    samples = 0
    for task in range(1, schedule.count + 1):
        labels = schedule.classes_of(task)
        new = sum(
            len(site.task_indices("train", labels.start, labels.stop)) for site in federation.sites.values()
        )
        samples += new * schedule.rounds[task - 1]
    share = experiment.rounds.fraction * experiment.learner.epochs
    teacher = 4 / 3 if experiment.learner.distillation is not None else 1.0
    return samples * share * teacher * _seconds_per_sample(experiment, federation.input_shape, device)


def _seconds_per_sample(experiment: Experiment, shape: tuple[int, ...], device: str) -> float:
    place = choose_device(device)
    size = experiment.learner.batch_size
    model = build_model(experiment.model, shape, 10, experiment.seed).to(place).train()
    inputs, labels = torch.zeros(size, *shape, device=place), torch.arange(size, device=place) % 10
    start = time.perf_counter()
    for batch in range(TIMED_BATCHES + 1):
        if batch == 1:
            start = time.perf_counter()
        F.cross_entropy(model(inputs), labels).backward()
        if place.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / (TIMED_BATCHES * size)


def duration(seconds: float) -> str:
    """For people: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
