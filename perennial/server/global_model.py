"""Builds, grows, evaluates and freezes the global model at the server.

Between rounds it is the dictionary of arrays that travel.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.registry import Registry
from perennial.foundation.streams import stream
from perennial.learning.device import autocast
from perennial.models.factory import build_model
from perennial.models.feature_maps.pixels import Constants
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state, load_complete, travelling


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

    def frozen(self) -> dict[str, Tensor]:
        """All tensors by name, frozen parts too: the previous model of the next task."""
        complete = complete_state(self._model)
        return {name: self.arrays.get(name, tensor) for name, tensor in complete.items()}

    def loaded(self) -> IncrementalModel:
        """The model with its present arrays, in evaluation mode."""
        return self.holding(self.arrays)

    def holding(self, arrays: Mapping[str, Tensor]) -> IncrementalModel:
        """The model with other arrays of its shape, in evaluation mode, until the next call.

        A large one holds them until the measuring in progress is over.
        """
        self._flat.load(arrays)
        return self._model.eval() if self._model.training else self._model

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which models are evaluated in the precision in which sites train."""
        with autocast(self._experiment.learner, self.device):
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
            for name, tensor in travelling(model).items()
        }
        self._rest()
