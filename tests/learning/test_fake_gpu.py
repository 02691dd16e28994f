"""A device whose values cannot be read (PyTorch's meta device) stands for a GPU, over every built-in network.

Tensors of two devices in one operation are an error there, and so is every look at a value, for which a
processor would have to wait. A turn reads its losses once, at its end.
"""

import sys

import numpy as np
import pytest
import torch

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import ConfigError
from perennial.learning.batches import TrainingSet
from perennial.learning.cohort_training import Member, train_cohort
from perennial.learning.training import train
from perennial.models.config import BACKBONES, ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel

DEVICE = torch.device("meta")
SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
MOVED = AugmentationConfig(crop_padding=2, flip=True)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Stand in for what the meta device lacks and a GPU has; the shapes of what is read as a list."""
    read: list[tuple[int, ...]] = []
    listed = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        if tensor.device != DEVICE:
            return listed(tensor)
        read.append(tuple(tensor.shape))
        return listed(torch.zeros(tensor.shape, dtype=tensor.dtype))

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    for name, module in list(sys.modules.items()):
        if name.startswith("perennial.") and hasattr(module, "to_device"):
            monkeypatch.setattr(module, "to_device", lambda tensor, place: tensor.to(place))
    # a GPU waits here, once a site and round
    monkeypatch.setattr(
        TrainingSet, "counts", lambda self, classes: torch.ones(classes, dtype=torch.int64, device=DEVICE)
    )
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda kind="cpu": False if kind == "meta" else enabled(kind)
    )
    return read


def learner(**more: object) -> LearnerConfig:
    plain = {"epochs": 1, "batch_size": 8, "optimizer": SGD, "classification": "balanced_softmax"}
    return LearnerConfig.model_validate(plain | more)


def samples(count: int) -> TrainingSet:
    x = torch.zeros(count, 3, 16, 16, dtype=torch.uint8, device=DEVICE)
    y = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    return TrainingSet(x, y, torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE))


def model(**settings: object) -> IncrementalModel:
    return build_model(ModelConfig.model_validate(settings), (3, 16, 16), 10, 1).to(DEVICE)


def turn(network: IncrementalModel, config: LearnerConfig, augmentation: AugmentationConfig) -> None:
    draws = np.random.default_rng(1)
    train(config, network, FlatParameters(network), samples(12), draws, augmentation=augmentation)


NETWORKS = [
    *({"name": name} for name in BACKBONES),
    {"name": "dual_backbone", "backbone": "small_cnn"},
    {"name": "small_cnn", "norm": "group"},
    {"name": "small_cnn", "squeeze_excitation": True},
]


@pytest.mark.parametrize("settings", NETWORKS, ids=str)
def test_a_turn_looks_at_its_losses_once(settings: dict[str, object], looks: list[tuple[int, ...]]) -> None:
    turn(model(**settings), learner(), AugmentationConfig())
    assert looks == [(2,)]


@pytest.mark.parametrize(
    "more",
    [{"optimizer": {"name": "adam", "lr": 0.001}}, {"contrastive": {}}, {"classification": "ce"}],
    ids=str,
)
def test_every_part_of_a_learner_stays_on_the_device(
    more: dict[str, object], looks: list[tuple[int, ...]]
) -> None:
    network = model(name="small_cnn")
    turn(network, learner(**more), MOVED)
    assert looks == [(2,)]


@pytest.mark.parametrize("settings", NETWORKS, ids=str)
def test_a_cohort_stays_on_the_device_or_is_refused_by_name(
    settings: dict[str, object], looks: list[tuple[int, ...]]
) -> None:
    network = model(**settings)
    vector = FlatParameters(network)
    members = [
        Member(samples(10 + 5 * place), vector.vector.clone(), np.random.default_rng(place))
        for place in range(2)
    ]
    try:
        train_cohort(learner(), network, vector, members, augmentation=MOVED)
    except ConfigError as error:
        assert str(settings["name"]) in str(error) or "no form for several sites" in str(error)
    else:
        assert len(looks) <= 2, "the losses, and which site has which"
