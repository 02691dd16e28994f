"""The models that this process works with: the one in training and the frozen one of the task before.

Building a model costs more than a small site's whole round, so each is built once and reloaded from then on;
simulated sites of one process share them, one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.models.factory import build_model
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.feature_maps.pixels import Constants
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, load_complete


@dataclass
class SiteModels:
    """One experiment's models on one device."""

    experiment: Experiment
    input_shape: tuple[int, ...]
    device: torch.device
    constants: Constants | None = None
    """Mean and std of the inputs."""
    _model: IncrementalModel | None = None
    _flat: FlatParameters | None = None
    _previous_in_model: str = ""
    _teacher: tuple[str, IncrementalModel] | None = None
    _fixed: FixedFeatures | None = None

    def load(
        self, num_classes: int, arrays: Mapping[str, Tensor], previous: tuple[str, dict[str, Tensor]] | None
    ) -> tuple[IncrementalModel, FlatParameters]:
        """The trainable model holding arrays, and its flat vector.

        previous: hash and complete tensors of the model at the end of the task before, for models that keep a
        frozen part of it. Raises ProtocolError naming the tensor when arrays do not
        fit the experiment's model.
        """
        sha256, tensors = previous or ("", None)
        if self._model is None or self._model.num_classes != num_classes or self._previous_in_model != sha256:
            self._model = self._flat = None
            model = self._built(num_classes)
            model.begin_task(tensors)
            self._model = self._placed(model)
            self._flat = FlatParameters(self._model, self.experiment.learner.channels_last)
            self._previous_in_model = sha256
        assert self._flat is not None
        try:
            self._flat.load(arrays)
        except StateError as error:
            raise ProtocolError(f"model received does not fit the experiment: {error}") from error
        return self._model, self._flat

    def check_complete(self, tensors: Mapping[str, Tensor], num_classes: int) -> None:
        """Raises ProtocolError naming the tensor unless tensors are a complete model of so many classes."""
        try:
            load_complete(self._built(num_classes), tensors)
        except StateError as error:
            raise ProtocolError(f"previous_arrays: not a model of this experiment: {error}") from error

    def teacher(self, previous: tuple[str, dict[str, Tensor]]) -> IncrementalModel:
        """The complete frozen model of the task before, in evaluation mode."""
        sha256, tensors = previous
        if self._teacher is None or self._teacher[0] != sha256:
            self._teacher = None
            model = self._built(len(tensors["head.weight"]))
            load_complete(model, tensors)
            self._teacher = (sha256, self._placed(model).eval().requires_grad_(False))
        return self._teacher[1]

    def fixed_features(self) -> FixedFeatures:
        """The fixed feature maps of the experiment's model. Raises ConfigError when the model has none."""
        if self._fixed is None:
            backbone = self._built(1).backbone
            if not isinstance(backbone, FixedFeatures):
                name = self.experiment.model.name
                raise ConfigError(f"model.name: found {name!r}, allowed 'features' for closed-form heads")
            self._fixed = backbone.to(self.device)
        return self._fixed

    def _built(self, num_classes: int) -> IncrementalModel:
        experiment = self.experiment
        shape, seed = self.input_shape, experiment.seed
        return build_model(experiment.model, shape, num_classes, seed, self.constants)

    def _placed(self, model: IncrementalModel) -> IncrementalModel:
        return model.to(self.device)
