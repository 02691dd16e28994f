"""Networks of the papers' size learn at the rates of their recipes, and do not diverge first."""

from dataclasses import dataclass
from math import log
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from perennial.config.experiment import load_experiment
from perennial.config.learner import Optimizer
from perennial.learning.optimizers import FlatOptimizer
from perennial.models.config import RESIDUAL, ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CLASSES, STEPS, BATCH = 10, 40, 32
FIRST = 8
"""Steps after which full residual branches had diverged."""


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, and the share of unseen images that the model tells right."""

    losses: list[float]
    accuracy: float


def recipes() -> dict[str, tuple[str, Optimizer]]:
    """Experiment -> its residual network and its optimiser."""
    found = {}
    for path in sorted(EXPERIMENTS.glob("*.yaml")):
        if any(name in path.read_text() for name in RESIDUAL):
            experiment = load_experiment(path)
            if experiment.model.backbone_name in RESIDUAL:
                found[path.stem] = experiment.model.backbone_name, experiment.learner.optimizer
    return found


RECIPES = recipes()


def images(count: int, side: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten smooth patterns of colour under noise of their own strength: (count, 3, side, side), labels."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % CLASSES
    clean = F.interpolate(patterns, size=(side, side), mode="bilinear")[labels]
    return clean + torch.randn(clean.shape, generator=draw), labels


def trained(network: str, optimizer: Optimizer, side: int, steps: int = STEPS) -> Trained:
    draw = torch.Generator().manual_seed(1)
    model = build_model(ModelConfig(name=network), (3, side, side), CLASSES, seed=1)
    flat = FlatParameters(model)
    stepper = FlatOptimizer(optimizer, flat.trainable, flat.gradient)
    x, y = images(20 * BATCH, side, draw)
    losses = []
    for _ in range(steps):
        flat.gradient.zero_()
        rows = torch.randint(len(y), (BATCH,), generator=draw)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        stepper.step()
        losses.append(float(loss.detach()))
    x, y = images(200, side, draw)
    with torch.no_grad():
        right = (model.eval()(x).argmax(dim=1) == y).float().mean()
    return Trained(losses, float(right))


def expect_learning(losses: list[float]) -> None:
    assert max(losses) < 2 * losses[0], "it diverged first"
    assert sum(losses[-10:]) / 10 < log(CLASSES), "it knows less than a guess that knows the classes"


def test_forty_steps_of_resnet20() -> None:
    expect_learning(trained(*RECIPES["cifar100_resnet20"], side=8).losses)


def test_first_steps_of_resnet18_at_the_rate_of_pp_fcil() -> None:
    losses = trained(*RECIPES["pp_fcil_as_published"], side=8, steps=FIRST).losses
    assert max(losses) < 2 * losses[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", RECIPES)
def test_forty_steps_at_a_recipes_own_rate(recipe: str) -> None:
    expect_learning(trained(*RECIPES[recipe], side=16).losses)


@pytest.mark.slow
def test_forty_steps_of_mobilenet_which_no_recipe_names() -> None:
    expect_learning(trained("mobilenet_v2", Optimizer(lr=0.01, momentum=0.9), side=16).losses)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_was_learnt_holds_for_other_images(recipe: str) -> None:
    assert trained(*RECIPES[recipe], side=16, steps=200).accuracy > 0.7


@pytest.mark.parametrize("network", RESIDUAL)
def test_each_residual_block_begins_as_its_shortcut(network: str) -> None:
    """A 1 on every last scale changes the answers: it is the branches that are silent, not the shortcuts."""
    model = build_model(ModelConfig(name=network), (3, 16, 16), CLASSES, seed=1).eval()
    silent = [name for name, value in model.named_parameters() if value.dim() == 1 and not value.any()]
    scales = [name for name in silent if name.endswith("weight")]
    blocks = {"resnet18": 8, "resnet20": 9, "resnet34": 16, "mobilenet_v2": 10}
    assert len(scales) == blocks[network]
    x, _ = images(4, 16, torch.Generator().manual_seed(2))
    before = model(x)
    with torch.no_grad():
        for name in scales:
            model.get_parameter(name).fill_(1)
    assert not torch.allclose(model(x), before)
