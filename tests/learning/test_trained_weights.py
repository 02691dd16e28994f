"""Whole runs held, step for step, against the loop that a person would write with torch.optim."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.learner import Optimizer
from perennial.config.run import RunSettings
from perennial.config.simulation import load_simulated_federation
from perennial.engine.run import run_in_process
from perennial.foundation.streams import stream
from perennial.learning.batches import to_float
from perennial.learning.optimizers import FlatOptimizer
from perennial.models.factory import build_model

ROUNDS = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "weight decay": {"lr": 0.1, "weight_decay": 0.05},
    "momentum, weight decay, cosine": {
        "lr": 0.1,
        "momentum": 0.5,
        "weight_decay": 0.02,
        "schedule": "cosine",
    },
    "cosine": {"lr": 0.2, "schedule": "cosine"},
    "adam": {"name": "adam", "lr": 0.01},
    "adam, weight decay": {"name": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adam, weight decay, cosine": {"name": "adam", "lr": 0.02, "weight_decay": 0.1, "schedule": "cosine"},
    "adamw": {"name": "AdamW", "lr": 0.01},
    "rmsprop, cosine": {"name": "rmsprop", "lr": 0.002, "momentum": 0.5, "schedule": "cosine"},
}
RULES = ["adadelta", "adagrad", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop"]


def experiment_file(folder: Path, optimizer: dict[str, Any], **changes: Any) -> Path:
    """One task, three sites of unequal size, two epochs a round, and a last batch that is not full."""
    path = folder / "experiment.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "held",
                "seed": 11,
                "data": {
                    "source": "digits",
                    "sites": 3,
                    "samples_limit": 150,
                    "partition": {"kind": "iid"},
                },
                "tasks": {"increments": [10], "rounds": ROUNDS},
                "model": {"name": "mlp", "hidden": [12]},
                "learner": {"preset": "none", "epochs": 2, "batch_size": 16, "optimizer": optimizer},
            }
            | changes
        )
    )
    return path


def torch_optimizer(config: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    if config.name == "adam":
        return torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    if config.name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=config.lr)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=config.lr, momentum=config.momentum)
    return torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )


def by_hand(experiment: Experiment) -> dict[str, Tensor]:
    """Federated averaging with torch.optim, and torch.optim's own cosine schedule over the rounds."""
    federation = load_simulated_federation(experiment)
    model = build_model(experiment.model, federation.input_shape, len(federation.classes), experiment.seed)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    config = experiment.learner.optimizer
    for number in range(1, ROUNDS + 1):
        mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        held = sum(len(data.train) for data in federation.sites.values())
        for site, data in federation.sites.items():
            x, y = to_float(data.x[data.train], data.mean, data.std), data.y[data.train]
            model.load_state_dict(state)
            model.train()
            model.zero_grad()
            optimizer = torch_optimizer(config, model)
            if config.schedule == "cosine":
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ROUNDS)
                for _ in range(number - 1):
                    optimizer.step()
                    schedule.step()
            generator = stream(experiment.seed, "batches", site, number)
            for _ in range(experiment.learner.epochs):
                order = torch.from_numpy(generator.permutation(len(y)))
                for batch in order.split(experiment.learner.batch_size):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            for name, value in model.state_dict().items():
                mean[name] += value.double() * len(y) / held
        state = {name: value.float() for name, value in mean.items()}
    return state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_ends_at_the_weights_of_torch_optim(tmp_path: Path, name: str) -> None:
    path = experiment_file(tmp_path, OPTIMIZERS[name])
    run_in_process(RunSettings(str(path), runs=str(tmp_path / "runs")))
    ours = load_file(tmp_path / "runs" / "held" / "model.safetensors")
    theirs = by_hand(load_experiment(path))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # the exact sum rounds a mean to 2^-35; ReLU and Adam's square root enlarge it a little
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_flat_vector_steps_as_torch_optim(name: str) -> None:
    config = Optimizer.model_validate(OPTIMIZERS[name])
    draw = torch.Generator().manual_seed(5)
    start = torch.randn(40, generator=draw)
    progress = 0.25
    flat, gradient = start.clone(), torch.zeros(40)
    ours = FlatOptimizer(config, flat, gradient, progress)
    theirs_at = nn.Parameter(start.clone())
    module = nn.Module()
    module.register_parameter("w", theirs_at)
    theirs = torch_optimizer(config, module)
    if config.schedule == "cosine":
        for group in theirs.param_groups:
            group["lr"] = config.lr * (1 + math.cos(math.pi * progress)) / 2
    for _ in range(6):
        gradient.copy_(torch.randn(40, generator=draw))
        theirs_at.grad = gradient.clone()
        before = gradient.clone()
        ours.step()
        theirs.step()
        assert torch.equal(gradient, before)
        torch.testing.assert_close(flat, theirs_at.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("progress", "share"), [(0.0, 1.0), (0.25, 0.8535534), (0.5, 0.5), (0.75, 0.1464466), (1.0, 0.0)]
)
def test_the_learning_rate_falls_along_half_a_cosine(progress: float, share: float) -> None:
    vector = torch.zeros(1)
    cosine = Optimizer(lr=0.4, schedule="cosine")
    assert FlatOptimizer(cosine, vector, vector, progress).lr == pytest.approx(0.4 * share, abs=1e-7)
    assert FlatOptimizer(Optimizer(lr=0.4), vector, vector, progress).lr == 0.4


@pytest.mark.parametrize("name", RULES)
def test_each_rule_of_torch_optim_moves_one_vector_as_it_moves_its_parts(name: str) -> None:
    kind = next(kind for kind in vars(torch.optim).values() if getattr(kind, "__name__", "").lower() == name)
    draw = torch.Generator().manual_seed(1)
    vector, gradient = torch.randn(9, generator=draw), torch.zeros(9)
    parts = [nn.Parameter(part.clone()) for part in vector.split([2, 4, 3])]
    theirs = kind(parts, lr=0.05)
    ours = FlatOptimizer(Optimizer.model_validate({"name": name, "lr": 0.05}), vector, gradient)
    for step in range(6):
        if step == 3:
            # the last part goes, as a site of a cohort does that is done
            states = [state[:6].clone() for state in ours.states]
            vector, gradient, parts = vector[:6].clone(), gradient[:6].clone(), parts[:2]
            ours.move(vector, gradient, states)
        gradient.copy_(torch.randn(len(gradient), generator=draw))
        for part, own in zip(parts, gradient.split([2, 4, 3][: len(parts)]), strict=True):
            part.grad = own.clone()
        ours.step()
        theirs.step()
        expected = torch.cat([part.detach() for part in parts])
        torch.testing.assert_close(vector, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "LBFGS"}, "evaluates the loss several times in a step"),
        ({"name": "sparseadam"}, "takes sparse gradients"),
        ({"name": "muon"}, "takes matrices"),
        ({"name": "os.system"}, "Input should be 'sgd', 'adam', 'adamw', 'adadelta'"),
        ({"name": "nadam", "momentum": 0.9}, "momentum is an option of sgd and rmsprop"),
        ({"name": "rprop", "weight_decay": 0.1}, "rprop has none"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_by_name(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Optimizer.model_validate({"lr": 0.1, **given})


def test_every_rule_of_torch_optim_is_taken_or_refused_by_name() -> None:
    kinds = {
        kind.__name__.lower()
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    with pytest.raises(ValueError) as refused:
        Optimizer.model_validate({"name": "none", "lr": 1})
    offered = {word for word in kinds if f"'{word}'" in str(refused.value)}
    assert offered == {"sgd", "adam", *RULES}
    for name in kinds - offered:
        with pytest.raises(ValueError, match="not offered, because it"):
            Optimizer.model_validate({"name": name, "lr": 1})
