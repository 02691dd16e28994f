"""The experiments that benchmarks time, written down once for the engine, the plain loop and Flower."""

from pathlib import Path
from typing import Any

import yaml

Settings = dict[str, Any]

_BASE: Settings = {
    "seed": 1,
    "tasks": {"count": 1},
    "model": {"name": "small_cnn"},
    "learner": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "classification": "ce"},
    "strategy": "fedavg",
    "evaluation": {"federated": False},
}


def _digits(sites: int) -> Settings:
    return {"source": "digits", "sites": sites, "partition": {"kind": "iid"}, "test_fraction": 0.2}


def _w1() -> Settings:
    """10 sites, all of them in each of 20 rounds: the time goes into local steps."""
    return _BASE | {
        "name": "w1",
        "data": _digits(10),
        "tasks": {"count": 1, "rounds": 20},
        "learner": _BASE["learner"] | {"epochs": 2, "batch_size": 32},
    }


def _w1_private() -> Settings:
    """W1 with every update clipped and noised at its site; the noise is too small to change the training."""
    privacy = {"mode": "client_local", "clip_norm": 10.0, "noise_multiplier": 1e-5}
    return _w1() | {"name": "w1_private", "privacy": privacy}


def _at_two_sites(workload: Settings) -> Settings:
    """The same data at two sites of 700 samples: longer turns."""
    return workload | {"name": f"{workload['name']}_two", "data": _digits(2)}


def _w2() -> Settings:
    """50 sites, 10 of them in each of 40 rounds of a few steps: the cost of each message shows."""
    return _BASE | {
        "name": "w2",
        "data": _digits(50),
        "tasks": {"count": 1, "rounds": 40},
        "rounds": {"fraction": 0.2},
        "learner": _BASE["learner"] | {"epochs": 1, "batch_size": 8},
    }


def _memory(sites: int) -> Settings:
    """The same data at 10 or 100 sites and a model of 9 MB, so that what is kept for each site shows."""
    return _BASE | {
        "name": f"memory_{sites}",
        "data": _digits(sites),
        "tasks": {"count": 2, "rounds": 2},
        "model": {"name": "mlp", "hidden": [1536, 1408]},
        "learner": _BASE["learner"] | {"epochs": 1, "batch_size": 32, "memory": {"per_class": 2}},
    }


WORKLOADS: dict[str, Settings] = {
    workload["name"]: workload
    for workload in (
        *(_w1(), _w1_private(), _at_two_sites(_w1()), _at_two_sites(_w1_private())),
        *(_w2(), _memory(10), _memory(100)),
    )
}


def write_workload(name: str, folder: Path) -> Path:
    """The workload as an experiment file in folder."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(WORKLOADS[name], sort_keys=False))
    return path
