"""Local training of several sites in one pass: what learning/training.py does for one, on a (K, P) matrix.

Each site keeps its own batches in the order of its own stream. Sites are sorted by their number of steps, so
that the sites that are done are the last ones, and later steps run with fewer. Reductions have another order
than one site alone has them: the results agree with those of `train` and are not the same bits.

Symbols: K sites, n samples of a site, P floats of the model, B batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import DataError
from perennial.foundation.streams import torch_seed
from perennial.learning.batches import TrainingSet
from perennial.learning.cohort_objective import CohortBatch, CohortBatches, CohortObjective
from perennial.learning.device import use_precision
from perennial.learning.objective import Extra
from perennial.learning.optimizers import FlatOptimizer
from perennial.learning.site_method import GradientCorrection
from perennial.learning.steps import AS_THEY_COME, DRAWS_ANEW, Steps
from perennial.learning.training import TrainingResult
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.models.stacked import stack


@dataclass(frozen=True)
class Member:
    """One site of a cohort. start: (P,), the model received. generator: of batches. Others: see `train`."""

    data: TrainingSet
    start: Tensor
    generator: np.random.Generator
    correction: GradientCorrection | None = None
    extra: Extra | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that must be equal for all members that train in one pass."""
        pull = self.correction.pull if self.correction is not None else 0.0
        shifts = self.correction is not None and self.correction.shift is not None
        return pull, shifts, self.extra is not None

    def steps(self, config: LearnerConfig) -> int:
        """Number of optimiser steps of this member in one round."""
        return config.epochs * ceil(len(self.data) / config.batch_size)


@dataclass(frozen=True, kw_only=True)
class MemberResult(TrainingResult):
    """end: (P,), the member's model after training. rows: (K, P), the updates of all members."""

    end: Tensor
    rows: Tensor


def train_cohort(
    config: LearnerConfig,
    model: IncrementalModel,
    flat: FlatParameters,
    members: Sequence[Member],
    *,
    teacher: IncrementalModel | None = None,
    augmentation: AugmentationConfig,
    progress: float = 0.0,
    first_class: int = 0,
    steps: Steps = AS_THEY_COME,
) -> list[MemberResult]:
    """Train every member, all of one kind, from its start; results in the members' order.

    model, flat: of one site; their values are not used and stay as they are, but for frozen parts, which
    are the same for all members. steps: what carries them out. Raises ConfigError when the model has no
    stacked form, DataError when a member has nothing to train on.
    """
    if not all(len(member.data) for member in members):
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    order = sorted(range(len(members)), key=lambda place: -members[place].steps(config))
    cohort = _Cohort(config, model, flat, members, order, augmentation)
    return cohort.run(teacher, progress, first_class, steps)


class _Cohort:
    """Members with most steps first, which is the order of places; results lie in the given order."""

    def __init__(
        self,
        config: LearnerConfig,
        model: IncrementalModel,
        flat: FlatParameters,
        given: Sequence[Member],
        places: Sequence[int],
        augmentation: AugmentationConfig,
    ) -> None:
        self._members = members = [given[place] for place in places]
        self._config, self._model, self._augmentation = config, model, augmentation
        self._steps = [member.steps(config) for member in members]
        self._network, self._sites = stack(model, flat, len(members))
        self._flat = flat
        one = all(member.start.data_ptr() == given[0].start.data_ptr() for member in given)
        starts = given[0].start[None] if one else torch.stack([member.start for member in given])
        self._starts, self._places = flat.to_row_major(starts), torch.tensor(places, device=starts.device)
        self._sites.load(self._starts.expand(len(given), -1) if one else self._starts[self._places])
        self._ends = starts.new_empty(len(given), starts.shape[1])
        # grouped convolutions prefer the channels last, in which PyTorch's group norm is less exact
        norms = any(isinstance(module, nn.GroupNorm) for module in model.modules())
        self._format = torch.contiguous_format if norms else torch.channels_last

    def run(
        self, teacher: IncrementalModel | None, progress: float, first_class: int, steps: Steps
    ) -> list[MemberResult]:
        config, sites, members = self._config, self._sites, self._members
        augmented = self._augmentation.active
        datasets, extras = [member.data for member in members], [member.extra for member in members]
        objective = CohortObjective(
            config.drop_idle_terms(progress),
            self._model,
            self._network,
            sites,
            datasets,
            teacher,
            augmented,
            first_class,
            extras,
        )
        optimizer = FlatOptimizer(
            config.optimizer, sites.vector, sites.gradient, progress, recorded=steps.records
        )
        before = sites.vector.clone()
        correction = self._stack_corrections()
        self._network.train()
        if any(isinstance(module, nn.Dropout) and module.p for module in self._model.modules()):
            # drawn before the batches are, as for one site
            sites.generators = [
                torch.Generator(before.device).manual_seed(torch_seed(member.generator)) for member in members
            ]
        generators = [member.generator for member in members]
        batches = CohortBatches(config, datasets, generators, self._augmentation, self._format)
        counted = batches.reported()
        totals = torch.zeros(2, len(members), device=before.device)

        def work(rows: Tensor, inputs: Tensor, labels: Tensor, counted_now: Tensor) -> None:
            with use_precision(config, before.device):
                losses, over_labels = objective(CohortBatch(rows, batch.sizes, inputs, labels))
            losses.sum().backward()
            if correction is not None:
                correction.apply(sites.gradient, sites.vector, before)
            optimizer.step()
            sites.gradient.zero_()
            totals[:, : sites.count].add_(torch.stack([losses.detach(), over_labels]) * counted_now)

        with steps.turn(self._explain_obstacle() or optimizer.obstacle) as carry_out:
            for step, sizes in enumerate(batches.sizes):
                there = int(np.count_nonzero(sizes))
                if there < sites.count:
                    before, correction = self._go_on_with(there, optimizer, before, correction)
                batch = batches.step(step, there)
                counted_now = counted[step][:there]
                carry_out(work, batch.rows, batch.inputs, batch.labels, counted_now, layout=batch.sizes)
        self._ends[self._places[: sites.count]] = sites.rows(sites.vector)
        updates, ends = self._flat.as_stored(self._ends - self._starts), self._flat.as_stored(self._ends)
        means = (totals / torch.tensor([len(data) for data in datasets], device=before.device)).tolist()
        measured = list(zip(means[0], self._steps, means[1], strict=True))
        order = self._places.argsort().tolist()
        return [
            MemberResult(update, *measured[place], end=end, rows=updates)
            for update, end, place in zip(updates, ends, order, strict=True)
        ]

    def _explain_obstacle(self) -> str:
        """Why no two steps are alike; '' where those of the same batch sizes are."""
        if any(member.extra is not None for member in self._members):
            return DRAWS_ANEW
        if self._sites.generators:
            return "each site of a cohort drops units by a stream of its own"
        return ""

    def _stack_corrections(self) -> GradientCorrection | None:
        """The members' corrections in the layout of the stacked vector; they differ in their shifts alone."""
        first = self._members[0].correction
        if first is None or first.shift is None:
            return first
        shifts = [member.correction.shift for member in self._members if member.correction is not None]
        rows = torch.stack([shift for shift in shifts if shift is not None])
        return replace(first, shift=self._sites.gathered(self._flat.to_row_major(rows)))

    def _go_on_with(
        self,
        count: int,
        optimizer: FlatOptimizer,
        before: Tensor,
        correction: GradientCorrection | None,
    ) -> tuple[Tensor, GradientCorrection | None]:
        """Take out the members that are done; returns before and correction of the others."""
        sites = self._sites
        self._ends[self._places[count : sites.count]] = sites.rows(sites.vector)[count:]
        shift = None if correction is None else correction.shift
        shifts = [] if shift is None else [shift]
        before, *kept = sites.keep(count, [before, *shifts, *optimizer.states])
        optimizer.move(sites.vector, sites.gradient, kept[len(shifts) :])
        if correction is not None and shifts:
            correction = replace(correction, shift=kept[0])
        return before, correction
