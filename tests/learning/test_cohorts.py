"""Sites that train in one pass: what each part computes, beside the sites one after the other."""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import ConfigError
from perennial.learning.batches import TrainingSet
from perennial.learning.cohort_training import Member, train_cohort
from perennial.learning.training import TrainingResult, train
from perennial.models.config import CONVOLUTIONAL, ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state, select_travelling
from perennial.models.stacked import StackedParameters, _stack_module, as_rows, check_stacked, join_batches

CLASSES = 6
RAGGED = (70, 33, 64, 9, 70)
"""Sizes with two, three or one batches of 32, some of which end short."""
MOST = 1e-2
"""Distance of two updates, one over the other, where a unit counts on one side only."""


def samples(count: int, shape: tuple[int, ...], first: int = 0) -> TrainingSet:
    draw = torch.Generator().manual_seed(count)
    if len(shape) == 1:
        x, mean = torch.randn((count, *shape), generator=draw), torch.zeros(shape)
    else:
        x = torch.randint(0, 255, (count, *shape), dtype=torch.uint8, generator=draw)
        mean = torch.full((shape[0],), 0.5)
    labels = torch.randint(first, CLASSES, (count,), generator=draw)
    return TrainingSet(x, labels, mean, torch.full_like(mean, 0.3))


def learner(**parts: Any) -> LearnerConfig:
    settings = {"preset": "none", "epochs": 2, "batch_size": 32, "optimizer": {"lr": 0.05, "momentum": 0.9}}
    return LearnerConfig.model_validate(settings | parts)


def built(model: dict[str, Any], shape: tuple[int, ...], classes: int = CLASSES) -> IncrementalModel:
    return build_model(ModelConfig.model_validate(model), shape, classes, 1)


def frozen(model: IncrementalModel) -> IncrementalModel:
    return model.eval().requires_grad_(False)


class Case:
    """The same members, trained one after the other and in one pass."""

    def __init__(
        self,
        model: IncrementalModel,
        config: LearnerConfig,
        sets: list[TrainingSet],
        augmentation: AugmentationConfig | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.config, self.sets = model, config, sets
        self.flat = FlatParameters(model)
        self.settings = {"augmentation": augmentation or AugmentationConfig(), **settings}
        # each site starts somewhere else, as sites with layers of their own do
        noise = [torch.randn(len(self.flat.vector), generator=_torch(k)) for k in range(len(sets))]
        self.starts = [self.flat.vector * 1.0 + 0.01 * each for each in noise]

    def alone(self, beside: Callable[[int], dict[str, Any]] = lambda site: {}) -> list[TrainingResult]:
        found = []
        for site, (start, data) in enumerate(zip(self.starts, self.sets, strict=True)):
            self.flat.vector.copy_(start)
            generator = np.random.default_rng(site)
            found.append(
                train(self.config, self.model, self.flat, data, generator, **self.settings, **beside(site))
            )
        return found

    def together(self, beside: Callable[[int], dict[str, Any]] = lambda site: {}) -> list[TrainingResult]:
        members = [
            Member(data, start, np.random.default_rng(site), **beside(site))
            for site, (start, data) in enumerate(zip(self.starts, self.sets, strict=True))
        ]
        return [*train_cohort(self.config, self.model, self.flat, members, **self.settings)]

    def agrees(
        self, beside: Callable[[int], dict[str, Any]] = lambda site: {}, tolerance: float = 5e-6
    ) -> None:
        pairs = [*zip(self.alone(beside), self.together(beside), strict=True)]
        distances = [float((one.update - other.update).norm() / one.update.norm()) for one, other in pairs]
        # now and then a unit lies within rounding of 0: its sample then counts on one side only
        assert median(distances) <= tolerance and max(distances) <= MOST, distances
        for one, other in pairs:
            assert other.loss == pytest.approx(one.loss, rel=1e-4)
            assert other.classification == pytest.approx(one.classification, rel=1e-4)
            assert other.steps == one.steps


def _torch(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def case(
    model: dict[str, Any], config: LearnerConfig, shape: tuple[int, ...] = (1, 8, 8), **more: Any
) -> Case:
    return Case(built(model, shape), config, [samples(size, shape) for size in RAGGED], **more)


SMALL = {"name": "small_cnn"}


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (SMALL, (1, 8, 8)),
        (SMALL, (1, 64, 72)),
        ({"name": "small_cnn", "norm": "group", "squeeze_excitation": True}, (3, 8, 8)),
        ({"name": "se_cnn"}, (1, 8, 8)),
        ({"name": "mlp", "hidden": (24, 12), "norm": "group"}, (1, 8, 8)),
        ({"name": "mlp", "hidden": ()}, (5,)),
        ({"name": "mlp", "dropout": 0.4}, (5,)),
        ({"name": "digest_two_branch", "backbone": "small_cnn"}, (1, 8, 8)),
        ({"name": "digest_two_branch", "backbone": "mlp"}, (5,)),
    ],
)
def test_a_cohort_trains_each_model_as_one_site_does(model: dict[str, Any], shape: tuple[int, ...]) -> None:
    case(model, learner(), shape).agrees()


LARGE = ("resnet18", "resnet34")
"""Networks with the blocks of resnet20, which take seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in CONVOLUTIONAL]
)
def test_gradients_of_a_stacked_network_in_float64(name: str) -> None:
    shape, count = (3, 16, 16), 3
    model = built({"name": name}, shape).double()
    tensors = select_travelling(model)
    sites = StackedParameters(
        {key: value.shape for key, value in tensors.items()}, count, tensors["head.bias"]
    )
    network = _stack_module(model, "", sites)
    sites.settle()
    vector = torch.cat([value.reshape(-1) for value in tensors.values()])
    # a scale that begins at 0 would hide its whole branch
    vector += 0.1 * torch.randn(vector.shape, generator=_torch(7), dtype=torch.float64)
    rows = torch.stack([vector * (1 + 0.1 * site) for site in range(count)])
    sites.load(rows)
    inputs = [torch.randn((4, *shape), generator=_torch(site), dtype=torch.float64) for site in range(count)]
    found = as_rows(network(join_batches(inputs)), count)
    found.square().sum().backward()
    for site, (row, x) in enumerate(zip(rows, inputs, strict=True)):
        for value, part in zip(
            tensors.values(), row.split([t.numel() for t in tensors.values()]), strict=True
        ):
            value.copy_(part.view(value.shape))
        model.zero_grad()
        expected = model(x)
        expected.square().sum().backward()
        gradient = torch.cat([_gradient(parameter) for parameter in model.parameters()])
        torch.testing.assert_close(found[site::count], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sites.rows(sites.gradient)[site], gradient, rtol=1e-9, atol=1e-9)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.reshape(-1)


@pytest.mark.parametrize(
    "parts",
    [
        {"classification": "balanced_softmax"},
        {"classification": "gradient_compensation"},
        {"classification": "icarl_bce"},
        {"contrastive": {"weight": 0.5}},
        {"contrastive": {"weight": 0.5, "form": "in"}},
        {"preset": "none", "optimizer": {"name": "adam", "lr": 0.01, "weight_decay": 0.1}},
        {"preset": "none", "optimizer": {"name": "rmsprop", "lr": 0.001, "momentum": 0.5}},
        {"preset": "none", "optimizer": {"lr": 0.05, "weight_decay": 0.1, "schedule": "cosine"}},
        {"memory": {"per_class": 2, "balanced": True}, "classification": "balanced_softmax"},
        {"batch_size": 1000},
        {"batch_size": 1, "epochs": 1},
    ],
)
def test_a_cohort_has_every_part_of_the_learner(parts: dict[str, Any]) -> None:
    case(SMALL, learner(**parts), progress=0.3).agrees()


@pytest.mark.parametrize("augmented", [False, True])
def test_a_dual_backbone_joins_each_sites_own_features(augmented: bool) -> None:
    shape = (3, 8, 8)
    named = {"name": "dual_backbone", "backbone": "small_cnn"}
    before = built(named, shape, 4)
    before.begin_task(None)
    model = built(named, shape)
    model.begin_task(complete_state(before))
    augmentation = AugmentationConfig(crop_padding=2, flip=True) if augmented else None
    config = learner(distillation={}, contrastive={}, consolidation={"weight": 2.0})
    sets = [samples(size, shape) for size in RAGGED]
    for progress in (0.0, 0.5):
        case = Case(
            model, config, sets, augmentation, teacher=frozen(before), first_class=4, progress=progress
        )
        case.agrees()


def test_a_cohort_repeats_to_the_bit_and_its_order_is_the_members() -> None:
    subject = case(SMALL, learner())
    first, again = subject.together(), subject.together()
    assert all(
        torch.equal(a.update, b.update) and a.loss == b.loss for a, b in zip(first, again, strict=True)
    )
    assert [result.steps for result in first] == [6, 4, 4, 2, 6]


class Mixing(nn.Module):
    """A plug-in whose code mixes what layers cannot tell apart."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.softmax(dim=1))


class OwnWeights(nn.Module):
    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] * self.scale


class OneSitesShapes(nn.Module):
    """Adds four numbers to whatever it gets: no site can tell, and several sites' numbers do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.ones(4)


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        (Mixing(), "what it computes for two sites"),
        (OneSitesShapes(), "its code between layers fits one site alone"),
        (OwnWeights(), "backbone: OwnWeights has no form"),
        (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), "backbone.1"),
        (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False)), "backbone.1"),
    ],
)
def test_a_model_without_a_stacked_form_is_named(backbone: nn.Module, said: str) -> None:
    model = IncrementalModel(backbone, 4, 3, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=said):
        check_stacked(model, (8,))
