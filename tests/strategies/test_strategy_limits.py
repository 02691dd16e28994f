"""Every key of a strategy is taken up to the limits that its error names, and refused beyond them."""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from perennial.config.learner import LearnerConfig
from perennial.foundation.errors import ConfigError
from perennial.privacy.config import PrivacyConfig
from perennial.strategies.factory import build_strategy
from perennial.strategies.fednova import FedNova
from perennial.strategies.round.context import RunContext

BASES: dict[str, dict[str, Any]] = {
    "clustered_personalisation": {"base": "fedavg", "global_rounds": 1},
    "contribution": {"base": "serial_ring"},
    "digest_synthesis": {"base": "fedavg"},
    "fedper": {"personal": ["head"]},
    "multi_factor": {"beta": 0.5},
    "pfa": {"global_rounds": 1, "layer": 1},
}
"""What a strategy must be told besides the key that is tried."""

LIMITS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("adabest", "mu", [0.0], [-0.1, math.nan]),
    ("adabest", "beta", [0.0, 0.99], [-0.1, 1.0]),
    ("analytic", "shrinkage", [0.5, 1.0], ["mean"]),
    ("clustered_personalisation", "global_rounds", [0, [0, 1]], [-1, [1, -1]]),
    ("clustered_personalisation", "channels", [1], [0]),
    ("clustered_personalisation", "layers", [1], [0]),
    ("clustered_personalisation", "clusters", [1, "auto"], [0]),
    ("clustered_personalisation", "sparsity_epsilon", [1e-6], [0.0, -1.0]),
    ("contribution", "every", [1], [0]),
    ("digest_synthesis", "server_epochs", [0, 1], [-1]),
    ("digest_synthesis", "server_lr", [1e-9], [0.0, math.inf]),
    ("digest_synthesis", "guidance_lr", [1e-9], [0.0, math.inf]),
    ("feddyn", "alpha", [1e-9], [0.0, math.nan]),
    ("fedadam", "server_lr", [1e-9], [0.0, math.inf]),
    ("fedadam", "tau", [1e-9], [0.0, math.inf]),
    ("fedper", "personal", [["head"]], [[]]),
    ("fedprox", "mu", [0.0], [-0.1, math.inf]),
    ("layer_attention", "alpha", [0.0, 2.0], [-0.1, 2.1]),
    ("multi_factor", "alpha", [1e-9], [-0.1, math.inf]),
    ("pfa", "layer", [1], [0]),
    ("scaffold", "server_lr", [1e-9], [0.0, math.nan]),
    ("serial_ring", "segments", [1], [0]),
    ("serial_ring", "init_noise_std", [0.0], [-0.1]),
    ("target", "samples", [2], [1]),
    ("target", "steps", [1], [0]),
    ("target", "distillation", [1e-9], [0.0]),
]


def built(name: str, changes: dict[str, Any]) -> None:
    build_strategy(name, BASES.get(name, {}) | changes)


@pytest.mark.parametrize(
    ("name", "key", "value"), [(name, key, value) for name, key, taken, _ in LIMITS for value in taken]
)
def test_a_key_is_taken_up_to_its_limits(name: str, key: str, value: Any) -> None:
    built(name, {key: value})


@pytest.mark.parametrize(
    ("name", "key", "value"), [(name, key, value) for name, key, _, refused in LIMITS for value in refused]
)
def test_a_key_is_refused_beyond_its_limits(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        built(name, {key: value})


def test_multi_factor_needs_one_factor_at_least() -> None:
    none: dict[str, Any] = dict.fromkeys(("alpha", "beta", "gamma", "delta"), 0.0)
    for name in none:
        built("multi_factor", none | {name: 0.1})
    with pytest.raises(ConfigError, match="not all 0"):
        built("multi_factor", none)


def test_shares_as_shrinkage_go_with_a_gaussian_head_alone() -> None:
    for changes in ({"shrinkage": 30.0}, {"shrinkage": "gcv"}, {"shrinkage": "validation"}):
        built("analytic", {"head": "ridge"} | changes)
    for changes in ({"shrinkage": 1.1}, {"shrinkage": "gcv"}):
        with pytest.raises(ConfigError, match="shrinkage"):
            built("analytic", {"head": "gaussian"} | changes)


@pytest.mark.parametrize(("optimizer", "momentum", "pull"), [("sgd", 0.9, 0.05), ("adam", 0.0, 0.0)])
def test_fednova_takes_momentum_and_pull_of_sgd_alone(optimizer: str, momentum: float, pull: float) -> None:
    learner = {"correction": {"name": "fedprox", "mu": 0.5}}
    chosen = {"name": optimizer, "lr": 0.1} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    experiment = SimpleNamespace(
        learner=LearnerConfig.model_validate(learner | {"preset": "none", "optimizer": chosen}),
        privacy=PrivacyConfig(),
    )
    strategy = FedNova()
    strategy.attach(cast(RunContext, SimpleNamespace(experiment=experiment)))
    assert (strategy._momentum, strategy._pull) == pytest.approx((momentum, pull))


ROOMS = ("learning", "strategies", "baselines", "privacy", "data")


def modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        package = importlib.import_module(f"perennial.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"perennial.{room}."):
            yield importlib.import_module(found.name)


def classes() -> Iterator[type]:
    for module in modules():
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == module.__name__:
                yield found


def name_of(found: type) -> str:
    return f"{found.__module__}.{found.__qualname__}"


SECTIONS = {name_of(found): found for found in classes() if issubclass(found, BaseModel)}


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_of_an_experiment_cannot_be_changed_and_refuses_unknown_keys(name: str) -> None:
    config = SECTIONS[name].model_config
    assert config.get("frozen") and config.get("extra") == "forbid"
