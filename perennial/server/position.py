"""The state of a run (its progress and its model), and the fields of requests that follow from it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Any, Self

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.schedule import Registry, TaskSchedule
from perennial.foundation.streams import stream
from perennial.learning.device import use_precision
from perennial.models.factory import build_model
from perennial.models.feature_maps.pixels import Constants
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state, load_complete, select_travelling
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors
from perennial.server.checkpoint import load_previous, save_previous
from perennial.server.run_folder import RunFolder
from perennial.server.run_states import Progress
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.request import PreviousModel


class GlobalModel:
    """The server's model: it grows with the tasks and holds the arrays that travel.

    arrays: the travelling tensors, replaced as a whole after each round and never written to.
    """

    def __init__(
        self,
        experiment: Experiment,
        registry: Registry,
        input_shape: tuple[int, ...],
        device: torch.device,
        constants: Constants | None = None,
    ) -> None:
        """Build the model of task 1. constants: mean and std of the inputs, for fixed maps of pixels."""
        self._experiment, self._registry, self.device = experiment, registry, device
        self.input_shape, self.constants = input_shape, constants
        self._model = self._build(registry.schedule.num_classes(1))
        self.arrays: dict[str, Tensor] = {}
        self._adopt(self._model.to(device))

    @property
    def feature_width(self) -> int:
        return self._model.feature_width

    def begin_task(self, task: int, previous: Mapping[str, Tensor] | None) -> None:
        """Grow the head for task's classes, from the complete model of the task before (None in task 1).

        Old rows are copied bit for bit; new rows come from the stream ("head", task), bias 0.
        """
        if previous is None:
            model = self._build(self._registry.schedule.num_classes(task))
        else:
            model = self._complete(previous)
            model.grow(self._registry.schedule.num_classes(task), stream(self._experiment.seed, "head", task))
            model.begin_task(dict(previous))
        self._adopt(model.to(self.device))

    def restore(self, task: int, arrays: Mapping[str, Tensor], previous: Mapping[str, Tensor] | None) -> None:
        """Give the model the state of a checkpoint inside a task. previous: the model of the task before."""
        model = self._build(self._registry.schedule.num_classes(task))
        model.begin_task(None if previous is None else dict(previous))
        self._adopt(model.to(self.device))
        self.arrays = {name: tensor.to(self.device) for name, tensor in arrays.items()}

    def stand_after(self, complete: Mapping[str, Tensor]) -> None:
        """Give the model its state at the end of a task. complete: its tensors there."""
        self._adopt(self._complete(complete).to(self.device))

    def collect_tensors(self) -> dict[str, Tensor]:
        """All tensors by name, frozen parts too: the previous model of the next task."""
        complete = complete_state(self._model)
        return {name: self.arrays.get(name, tensor) for name, tensor in complete.items()}

    def load_current(self) -> IncrementalModel:
        """The model with its present arrays, in evaluation mode."""
        return self.load_arrays(self.arrays)

    def load_arrays(self, arrays: Mapping[str, Tensor]) -> IncrementalModel:
        """The model with other arrays of its shape, in evaluation mode, until the next call.

        A large one holds them until the measuring in progress is over.
        """
        self._flat.load(arrays)
        return self._model.eval() if self._model.training else self._model

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which models are evaluated in the precision in which sites train."""
        with use_precision(self._experiment.learner, self.device):
            yield
        self._rest()

    def _rest(self) -> None:
        """Give the memory of a large model back; the arrays have its values."""
        if self._flat.large:
            self._flat.forget()

    def _build(self, num_classes: int) -> IncrementalModel:
        experiment = self._experiment
        shape, seed = self.input_shape, experiment.seed
        return build_model(experiment.model, shape, num_classes, seed, self.constants)

    def _complete(self, tensors: Mapping[str, Tensor]) -> IncrementalModel:
        model = self._build(len(tensors["head.weight"]))
        load_complete(model, dict(tensors))
        return model

    def _adopt(self, model: IncrementalModel) -> None:
        self._model = model
        self._flat = FlatParameters(model, self._experiment.learner.channels_last)
        self.arrays = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in select_travelling(model).items()
        }
        self._rest()


@dataclass
class Position:
    """The state that tasks and rounds of a run share; a checkpoint stores all of it that can change.

    previous: the complete model of the task before, without its holders, which progress lists.
    """

    experiment: Experiment
    registry: Registry
    progress: Progress
    model: GlobalModel
    previous: PreviousModel

    @classmethod
    def of(cls, experiment: Experiment, registry: Registry, model: GlobalModel, folder: RunFolder) -> Self:
        """The state that the folder's checkpoint holds, or that of a beginning; brings `model` there too."""
        checkpoint = folder.checkpoint
        progress = checkpoint.progress if checkpoint else folder.create_progress()
        if experiment.data.only_at_sites and not progress.secret:
            progress.secret = token_hex(16)
        position = cls(experiment, registry, progress, model, PreviousModel())
        if checkpoint is None:
            return position
        if progress.previous:
            position.previous = _build_previous(folder, progress.previous)
        previous = position.previous.read()
        if progress.round_in_task:
            model.restore(progress.task, checkpoint.arrays, previous)
        elif progress.task > registry.schedule.count and previous is not None:
            # nothing is left to do but to write down what there is
            model.stand_after(previous)
        return position

    @property
    def schedule(self) -> TaskSchedule:
        return self.registry.schedule

    @property
    def num_classes(self) -> int:
        """Number of classes seen so far, with those of the current task."""
        return self.schedule.num_classes(self.progress.task)

    @property
    def one_classifier(self) -> bool:
        """Whether all sites judge with the saved model's classifier, not each with its own class means."""
        return self.experiment.learner.classifier != "nearest_mean"

    @property
    def in_pretraining(self) -> bool:
        """Whether the next round is one of pre-training."""
        return self.progress.round_in_task < self.experiment.lead_rounds(self.progress.task)

    def rounds(self, task: int) -> int:
        """Number of rounds planned for a task, those of pre-training included."""
        return self.experiment.lead_rounds(task) + self.schedule.rounds[task - 1]

    def stamp(self, number: int) -> Stamp:
        """The stamp of requests in round `number`, from 1, of the current task."""
        return Stamp(
            run=self.progress.run,
            experiment=self.experiment.digest,
            class_order=self.registry.order_hash,
            split_key=self.progress.split_key,
            task=self.progress.task,
            round=number,
            num_classes=self.num_classes,
        )

    def select_previous(self) -> PreviousModel:
        """The model of the task before and its holders; an empty one if no site needs it."""
        if not self.experiment.needs_previous:
            return PreviousModel()
        return replace(self.previous, holders=frozenset(self.progress.holders))

    def build_request_fields(self, site: str) -> dict[str, Any]:
        """The fields, common to all kinds, of a request to `site` after the latest round.

        The previous model is sent only to a site that does not hold it.
        """
        return {
            **self.stamp(self.progress.round).stamp_fields,
            "arrays": Tensors(self.model.arrays),
            **self.select_previous().build_site_fields(site),
        }

    def apply_outcome(self, outcome: RoundOutcome) -> None:
        """Adopt the model of an aggregated round and count it; a skipped round is not counted.

        A site that trained holds the previous model; one that failed gets it again.
        """
        progress = self.progress
        failed = {site for site, _ in (*outcome.dropped, *outcome.refused)}
        progress.holders = sorted(({*progress.holders} | {*outcome.participants}) - failed)
        if outcome.arrays is not None:
            progress.aggregated()
            self.model.arrays = outcome.arrays

    def task_learnt(
        self, sha256: str, arrays: Mapping[str, Tensor], holders: list[str], folder: RunFolder
    ) -> None:
        """Store the finished task's complete model, held by sites `holders`, and go on to the next task."""
        save_previous(folder.checkpoint_folder, sha256, arrays, self.progress.previous)
        self.previous = _build_previous(folder, sha256)
        self.progress.task_learnt(sha256, holders)


def _build_previous(folder: RunFolder, sha256: str) -> PreviousModel:
    return PreviousModel(sha256, partial(load_previous, folder.checkpoint_folder, sha256))
