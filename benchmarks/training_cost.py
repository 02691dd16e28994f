"""What local training of a whole run costs: in seconds on this machine, and in operations on any."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from perennial.config.experiment import Experiment
from perennial.config.simulation import simulated_federation
from perennial.learning.device import choose_device
from perennial.models.factory import build_model
from perennial.models.incremental import complete_state

TIMED_BATCHES = 3
LARGEST_ON_CPU = 16
"""Samples of a timed batch: a processor is no faster with more, and a large network takes long for them."""
CLASSES = 10


@dataclass(frozen=True)
class TrainingCost:
    """Of one run, all sites one after the other. No exchange, no evaluation.

    operations: floating-point operations of matrix products and convolutions, a multiply-add counted as two.
    """

    seconds: float
    operations: float


def training_cost(experiment: Experiment, device: str) -> TrainingCost:
    """From the number of samples, exemplars included, and a few batches of a task that has a past."""
    from torch.utils.flop_counter import FlopCounterMode

    samples, shape = trained_samples(experiment)
    place = choose_device(device)
    size = experiment.learner.batch_size
    if place.type == "cpu":
        size = min(size, LARGEST_ON_CPU)
    step = _step(experiment, shape, size, place)
    with FlopCounterMode(display=False) as counter:
        step()
    start = time.perf_counter()
    for _ in range(TIMED_BATCHES):
        step()
    if place.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (TIMED_BATCHES * size)
    return TrainingCost(samples * seconds, samples * counter.get_total_flops() / size)


def trained_samples(experiment: Experiment) -> tuple[float, tuple[int, ...]]:
    """(passes of one sample through training in the whole run, shape of a sample)."""
    federation = simulated_federation(experiment)
    schedule, memory = federation.registry.schedule, experiment.learner.memory
    samples = 0
    for site in federation.sites.values():
        seen = 0
        for task in range(1, schedule.count + 1):
            labels = schedule.classes_of(task)
            new = len(site.task_indices("train", labels.start, labels.stop))
            old = labels.start
            kept = 0
            if memory is not None and old:
                kept = min(seen, memory.quota(old, len(federation.sites)) * old)
            samples += (new + kept) * schedule.rounds[task - 1]
            seen += new
    return samples * experiment.rounds.fraction * experiment.learner.epochs, federation.input_shape


def _step(
    experiment: Experiment, shape: tuple[int, ...], size: int, place: torch.device
) -> Callable[[], None]:
    """One training step on empty inputs, with the frozen models that a later task has."""
    make = partial(build_model, experiment.model, shape, CLASSES, experiment.seed)
    model, teacher = make(), None
    model.begin_task(complete_state(make()))
    model = model.to(place).train()
    if experiment.learner.needs_previous:
        teacher: nn.Module | None = make()
        teacher.begin_task(complete_state(make()))
        teacher = teacher.to(place).eval().requires_grad_(False)
    inputs, labels = torch.zeros(size, *shape, device=place), torch.arange(size, device=place) % CLASSES

    def step() -> None:
        if teacher is not None:
            teacher(inputs)
        F.cross_entropy(model(inputs), labels).backward()

    return step
