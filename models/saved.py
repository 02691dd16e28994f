"""A finished run's model, ready to be used alone: the file holds everything that it needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foundation.errors import StateError
from models.config import ModelConfig
from models.incremental import IncrementalModel, load_complete
from models.registry import build_model

GLOBAL_MODEL = "model.safetensors"
"""In a run's folder."""
PERSONAL_MODEL = "personal_model.safetensors"
"""In a site's state folder; mode 0600."""


@dataclass(frozen=True)
class SavedModel:
    """model: in evaluation mode. classes: names by label. settings: the experiment, as a mapping."""

    model: IncrementalModel
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    mean: Tensor
    std: Tensor
    settings: dict[str, Any]


def load_saved(path: Path) -> SavedModel:
    """The model in a model.safetensors. Raises StateError naming the file when it is missing, damaged or
    incomplete."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        settings = json.loads(metadata["experiment"])
        classes = tuple(json.loads(metadata["classes"]))
        shape = tuple(json.loads(metadata["input_shape"]))
        constants = json.loads(metadata["constants"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateError(f"{path}: missing, damaged or not the model of a finished run ({error})") from error
    if constants is None:
        raise StateError(
            f"{path}: trained without known input constants; set data.normalise in the experiment"
        )
    model = build_model(ModelConfig.model_validate(settings["model"]), shape, len(classes), settings["seed"])
    load_complete(model, tensors)
    mean, std = (torch.tensor(values) for values in constants)
    return SavedModel(model.eval(), classes, shape, mean, std, settings)
