"""The network of a finished run, cut before its classifier, as a fixed map."""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.plain import PlainObject, read_object
from perennial.models.class_means import CLASS_MEANS, GAUSSIAN_HEAD
from perennial.models.config import RunLayout
from perennial.models.feature_maps.config import ModelMapConfig
from perennial.models.feature_maps.weights import known_content, tensors_in
from perennial.models.incremental import IncrementalModel, below, load_complete

NetworkOf = Callable[[RunLayout], IncrementalModel]
"""Makes the network of a layout, without weights, as models/factory.py does."""


class FinishedRun(nn.Module):
    """(B, C, H, W) pixels in 0..255, or (B, D) numbers as they were stored -> (B, width) features."""

    def __init__(self, network: IncrementalModel, shape: tuple[int, ...], about: str) -> None:
        """network: the run's, whose head is not used. shape: of a sample. about: text for the map's hash."""
        super().__init__()
        self.network, self.width, self.about = network, network.feature_width, about
        self._largest = 255.0 if len(shape) == 3 else 1.0
        constants = (shape[0], *(1 for _ in shape[1:]))
        self.mean = nn.Parameter(torch.zeros(constants), requires_grad=False)
        self.std = nn.Parameter(torch.ones(constants), requires_grad=False)

    def forward(self, stored: Tensor) -> Tensor:
        return self.network.features((stored / self._largest - self.mean) / self.std)

    def restructure(self, state: Mapping[str, Tensor]) -> None:
        """Add or remove modules of the network until it has those of `state`."""
        self.network.restructure(below("network.", state))
        self.requires_grad_(False)


def layout_of(path: Path) -> PlainObject:
    """The layout of a finished run's network, read from its model file: the keys of RunLayout.

    Raises ConfigError naming the file if it is no such file, or its model cannot serve as a map.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        settings, inputs = read_object(metadata["experiment"]), read_object(metadata["inputs"])
        classes = json.loads(metadata["classes"])
        if settings["model"]["name"] == "features":
            raise ConfigError(
                f"model.features: {path}: a run on fixed maps, which learnt no features; allowed: its maps"
            )
        if len(inputs["shape"]) == 3 and inputs.get("stored", "uint8") != "uint8":
            raise ConfigError(
                f"model.features: {path}: learnt from images of numbers in a scale of their own; allowed: "
                "images of 8-bit pixels, or tables"
            )
        taken = {key: inputs[key] for key in ("shape", "mean", "std")}
        return {
            "name": settings["name"],
            "model": settings["model"],
            "seed": settings["seed"],
            "classes": len(classes),
            "inputs": taken,
        }
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.features: {path}: not the model.safetensors of a finished run ({error})"
        ) from error


def build_finished_run(
    config: ModelMapConfig, shape: tuple[int, ...], with_weights: bool, network_of: NetworkOf
) -> tuple[FinishedRun, dict[str, str]]:
    """(the map, facts about it for whoever approves it). Raises ConfigError if its weights are missing.

    network_of: builds a network from a layout. with_weights: False leaves the weights unread.
    """
    assert config.sha256 is not None
    layout = RunLayout.model_validate(config.layout)
    learnt = layout.inputs.shape
    if learnt != tuple(shape):
        raise ConfigError(
            f"model.features: run {layout.name!r} learnt from samples of shape {learnt}, "
            f"and the data has shape {shape}; allowed: the same"
        )
    network = network_of(layout)
    about = f"finished run {json.dumps(layout.model_dump(mode='json'), sort_keys=True)}"
    module = FinishedRun(network, shape, about)
    for name in ("mean", "std"):
        constants = getattr(module, name)
        constants.data.copy_(torch.tensor(getattr(layout.inputs, name)).view(constants.shape))
    if with_weights:
        try:
            load_complete(network, _tensors_of(config.file, config.sha256))
        except StateError as error:
            raise ConfigError(f"model.features: the file of run {layout.name!r}: {error}") from error
    network.requires_grad_(False)
    return module.eval(), {"run": layout.name, "sha256": config.sha256}


@lru_cache(maxsize=2)
def _tensors_of(file: str | None, sha256: str) -> dict[str, Tensor]:
    tensors = tensors_in(known_content("a finished run", file, sha256), file or sha256)
    return {name: found for name, found in tensors.items() if name not in (CLASS_MEANS, GAUSSIAN_HEAD)}


def written_down(features: PlainObject) -> None:
    """Add a file's hash and layout to a map's keys if missing. Raises ConfigError if it cannot be used."""
    path = Path(features["file"])
    if features.get("sha256") is None:
        try:
            features["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"model.features: {path}: cannot be read ({error.strerror})") from error
    if features.get("layout") is None:
        features["layout"] = layout_of(path)
