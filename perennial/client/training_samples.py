"""Which samples a site trains on in a round, and which of them it keeps when a task ends."""

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from perennial.client.exemplars import ExemplarStore
from perennial.client.learnt import not_learnt, note_learnt
from perennial.client.policy import hides_count
from perennial.client.release import stays_here
from perennial.client.site import Site
from perennial.foundation.errors import DataError
from perennial.foundation.streams import stream
from perennial.learning.evaluation import unit_features
from perennial.models.incremental import IncrementalModel
from perennial.protocol.stamp import Stamp

Previous = tuple[str, dict[str, Tensor]] | None
"""(hash, tensors) of the model of the task before."""


def training_indices(site: Site, stamp: Stamp, previous: Previous) -> tuple[Tensor, int]:
    """(indices of the samples to train on in this task, new ones first; how many of them are exemplars).

    previous: the previous task's model, by which a site that was away chooses exemplars late. In a run that
    goes on, new records of earlier classes count among the exemplars. The policy's floor is checked later, on
    what is computed from them.
    Raises DataError when there is none, unless noise hides that.
    """
    classes = site.task_range(stamp)
    new = indices_left_for_training(site, stamp, site.data.task_indices("train", classes.start, classes.stop))
    old = late = torch.empty(0, dtype=torch.int64)
    if site.experiment.learner.memory is not None and stamp.task > 1:
        store = site.exemplars(stamp.run)
        with stays_here("exemplars") if hides_count(site.identity) else nullcontext():
            _catch_up(site, store, stamp, previous)
        late = not_learnt(site, stamp)
        old = torch.cat([store.indices(before_round=stamp.round), late])
    if site.experiment.data.kind.collected:
        note_learnt(site, stamp, torch.cat([new, late]))
    indices = torch.cat([new, old])
    if len(indices) == 0 and not hides_count(site.identity):
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    return indices, len(old)


def _catch_up(site: Site, store: ExemplarStore, request: Stamp, previous: Previous) -> None:
    """Choose the exemplars of tasks that ended while the site was away, with the previous task's model."""
    if previous is None:
        return
    held = set(site.data.y[store.indices(before_round=request.round)].tolist())
    known = site.task_range(request).start
    missed = [label for label in range(known) if label not in held]
    missed = [label for label in missed if len(site.data.task_indices("train", label, label + 1))]
    if missed:
        choose_exemplars(site, store, site.models.teacher(previous), missed, known, version=request.round - 1)


def choose_exemplars(
    site: Site, store: ExemplarStore, model: IncrementalModel, labels: Iterable[int], known: int, version: int
) -> None:
    """Choose and store exemplars of the classes in labels, within the memory's budget.

    known: classes known in all, which share the budget. version: the round after which the choice holds.
    """
    memory = site.experiment.learner.memory
    assert memory is not None
    quota = memory.quota(known, site.process.sites)
    members: dict[int, Tensor] = {}
    features: dict[int, Tensor] = {}
    for label in labels:
        indices = site.data.task_indices("train", label, label + 1)
        if len(indices):
            members[label] = indices
            if memory.selection != "random":
                features[label] = unit_features(model, site.samples(indices))
    store.choose(memory, quota, features, members, version)


def balanced_choice(labels: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """Sorted (count,) int64 indices into labels, (n,) int64, as evenly over classes as there are samples.

    A class that has too few gives all of them, and the others fill up. A draw decides which classes give one
    more than others. Raises ValueError unless 1 <= count <= n.
    """
    if not 1 <= count <= len(labels):
        raise ValueError(f"count: found {count}, allowed 1 to {len(labels)}")
    order = generator.permutation(len(labels))
    _, inverse, sizes = np.unique(labels.cpu().numpy()[order], return_inverse=True, return_counts=True)
    # how many of its class come before each sample: taking by turns is taking the lowest of these
    by_class = np.argsort(inverse, kind="stable")
    turn = np.empty(len(order), dtype=np.int64)
    turn[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = order[np.argsort(turn, kind="stable")[:count]]
    return torch.from_numpy(np.sort(chosen))


def indices_left_for_training(site: Site, request: Stamp, indices: Tensor) -> Tensor:
    """indices (n,) of the task's new samples, or those of them that pre-training leaves for this round.

    Raises ConfigError when the site has fewer than pre-training asks of each site.
    """
    config = site.experiment.pretraining
    if config is None or request.task != 1:
        return indices
    config.require(site.name, len(indices))
    generator = stream(site.experiment.seed, "pretraining", site.name)
    chosen = balanced_choice(site.data.y[indices], config.samples, generator)
    if request.round <= config.rounds:
        return indices[chosen]
    if not config.exclude:
        return indices
    rest = torch.ones(len(indices), dtype=torch.bool)
    rest[chosen] = False
    return indices[rest]
