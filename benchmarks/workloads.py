"""The experiments that benchmarks time, written down once for the engine, the plain loop and Flower."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Settings = dict[str, Any]
MOVED_DIGITS = "moved_digits.npz"

_BASE: Settings = {
    "seed": 1,
    "tasks": {"count": 1},
    "model": {"name": "small_cnn"},
    "learner": {
        "preset": "none",
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "classification": "ce",
    },
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


def _w3() -> Settings:
    """100 sites of 60 samples, all in each of 20 rounds: where simulators of many clients are at home.

    The digits moved by up to a pixel, since there are not enough of them as they are.
    """
    return _BASE | {
        "name": "w3",
        "data": {"source": "npz", "path": MOVED_DIGITS, "sites": 100, "partition": {"kind": "iid"}},
        "tasks": {"count": 1, "rounds": 20},
        "learner": _BASE["learner"] | {"epochs": 1, "batch_size": 20},
    }


def _write_moved_digits(path: Path) -> None:
    """6,000 training and 1,000 test images (N, 1, 8, 8), from different digits."""
    # here: the others are timed from their start, and do not need it
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = np.pad((x.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), ((0, 0), (1, 1), (1, 1)))
    draw = np.random.default_rng(0)
    order = draw.permutation(len(images))
    parts: dict[str, Any] = {}
    for suffix, chosen, count in (("", order[:1400], 6000), ("_test", order[1400:], 1000)):
        rows = chosen[np.arange(count) % len(chosen)]
        down, right = draw.integers(0, 3, (2, count))
        windows = np.lib.stride_tricks.sliding_window_view(images, (8, 8), (1, 2))
        parts[f"x{suffix}"], parts[f"y{suffix}"] = windows[rows, down, right][:, None], y[rows]
    np.savez(path, **parts)


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
        *(_w2(), _w3(), _memory(10), _memory(100)),
    )
}


def write_workload(name: str, folder: Path) -> Path:
    """The workload as an experiment file in folder, with the data that it reads, if it has a file of them."""
    path = folder / f"{name}.yaml"
    settings = WORKLOADS[name]
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    if settings["data"].get("path") == MOVED_DIGITS:
        _write_moved_digits(folder / MOVED_DIGITS)
    return path


def failed(rounds: Iterable[Settings]) -> bool:
    """Whether a site did not do its part, by the journal's lines of rounds: then a time means nothing."""
    return any(each["refused"] or each["dropped"] for each in rounds)
