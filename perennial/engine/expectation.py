"""Estimates the time and memory of a run on this machine: times a few steps and counts the rest."""

import resource
import sys
import time
from dataclasses import dataclass

import torch

from perennial.config.experiment import Experiment
from perennial.config.simulation import simulated_federation
from perennial.data.federation import SimulatedFederation
from perennial.data.site import SiteData
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation import by_head, count_correct
from perennial.learning.training import train
from perennial.models.factory import build_model
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel

TIMED_BATCHES = 2


@dataclass(frozen=True)
class Expectation:
    """Expected cost of a run.

    work: in words, what was counted and timed. seconds: without what a strategy adds. memory: bytes.
    steps: of the optimiser, of all sites and rounds.
    """

    work: str
    seconds: float
    memory: int
    steps: int = 0

    def in_words(self) -> str:
        """The expected time and memory in one line."""
        about = f"{self.seconds / 60:.0f} min" if self.seconds >= 90 else f"{max(1, self.seconds):.0f} s"
        memory = f"{self.memory / 1e9:.1f} GB of memory"
        return f"expected here in one process: about {about} ({self.work}) and {memory}"


def expect(experiment: Experiment) -> Expectation | None:
    """Estimate a run's cost: train two batches of the largest site on the processor, and time them.

    With fixed features, one batch of samples is mapped instead. None if no site has two samples to train on.
    """
    federation = simulated_federation(experiment)
    learner, registry = experiment.learner, federation.registry
    largest = max(federation.sites.values(), key=lambda site: len(site.train))
    rows = largest.train[: TIMED_BATCHES * learner.batch_size]
    if len(rows) < 2:
        return None
    torch.set_num_threads(1)
    shape, seed = federation.input_shape, experiment.seed
    constants = federation.mean, federation.std
    model = build_model(experiment.model, shape, len(registry.classes), seed, constants)
    data = TrainingSet(largest.x[rows], largest.y[rows], *constants)
    if not experiment.strategy.trains:
        return _of_features(model, data, len(largest.y))
    flat = FlatParameters(model)
    once = learner.model_copy(update={"epochs": 1, "distillation": None})
    if learner.classification.needs_previous:
        once = once.model_copy(update={"classification": type(learner.classification)()})
    seconds = []
    for attempt in range(2):
        started = time.perf_counter()
        done = train(
            once,
            model,
            flat,
            data,
            stream(seed, "expectation", attempt),
            augmentation=experiment.data.augmentation,
        )
        seconds.append((time.perf_counter() - started) / done.steps)
    started = time.perf_counter()
    count_correct(by_head(model.eval()), data, len(registry.classes))
    measuring = (time.perf_counter() - started) / len(rows)
    steps = sum(_steps(experiment, federation, site) for site in federation.sites.values())
    total = min(seconds) * steps + measuring * _measured(experiment, federation)
    work = f"{steps:,} steps of {1000 * min(seconds):.1f} ms, and measuring"
    return Expectation(work, total, _peak_memory(), steps)


@torch.no_grad()
def _of_features(model: IncrementalModel, data: TrainingSet, samples: int) -> Expectation:
    """Each sample is mapped once; the sums and the solution are small beside that."""
    started = time.perf_counter()
    model.eval().features(data.inputs(slice(None)))
    each = (time.perf_counter() - started) / len(data)
    maps = model.backbone
    width = maps.widest if isinstance(maps, FixedFeatures) else model.feature_width
    sums = 3 * 8 * width**2
    work = f"{samples:,} samples mapped once, {1000 * each:.1f} ms each, and the solution"
    return Expectation(work, each * samples, _peak_memory() + sums)


def _steps(experiment: Experiment, federation: SimulatedFederation, site: SiteData) -> int:
    """Of one site in the whole run: its new samples of each task, and the exemplars of those before."""
    learner, registry = experiment.learner, federation.registry
    schedule, steps = registry.schedule, 0
    for task in range(1, schedule.count + 1):
        classes = schedule.classes_of(task)
        samples = len(site.task_indices("train", classes.start, classes.stop))
        if learner.memory is not None:
            kept = min(learner.memory.quota(classes.stop, len(federation.sites)), 10**6)
            held = site.counts("train", len(registry.classes))[: classes.start]
            samples += int(held.clamp(max=kept).sum())
        rounds = experiment.lead_rounds(task) + schedule.rounds[task - 1]
        steps += learner.epochs * -(-samples // learner.batch_size) * rounds
    return steps


def _measured(experiment: Experiment, federation: SimulatedFederation) -> int:
    """Samples that are measured in the whole run, at the server and at the sites."""
    schedule, test = federation.registry.schedule, federation.test
    held = 0 if test is None or not experiment.evaluation.central else len(test.test)
    at_sites = sum(len(site.test) for site in federation.sites.values())
    by_sites = at_sites if experiment.evaluation.federated else 0
    times = sum(schedule.rounds) if experiment.evaluation.every == "round" else schedule.count
    return (held * times + by_sites * schedule.count) * 2 // 3


def _peak_memory() -> int:
    """Bytes that this process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
