"""A workload as arrays, the network, and what each peer reports: the part that every adapter shares.

Adapters run in environments of their own, so this module knows PyTorch and NumPy and nothing of Perennial.
Shapes: x (n, C, H, W) float32, normalised; y (n,) int64.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A workload as arrays.

    sites: training samples of each.
    initial: the first model's tensors, in the order of network().
    """

    rounds: int
    sites_per_round: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    seed: int
    sites: list[Samples]
    test: Samples
    initial: list[Tensor]


def read_task(folder: Path) -> Task:
    """What prepare.write_task wrote; sets one thread."""
    torch.set_num_threads(1)
    facts: dict[str, Any] = json.loads((folder / "task.json").read_text())
    arrays = np.load(folder / "task.npz")
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    sizes: list[int] = facts.pop("sizes")
    shapes: list[list[int]] = facts.pop("shapes")
    values = torch.from_numpy(arrays["model"]).split([prod(shape) for shape in shapes])
    initial = [part.view(shape) for part, shape in zip(values, shapes, strict=True)]
    test = torch.from_numpy(arrays["x_test"]), torch.from_numpy(arrays["y_test"])
    return Task(
        **facts, sites=list(zip(x.split(sizes), y.split(sizes), strict=True)), test=test, initial=initial
    )


def network(task: Task) -> nn.Sequential:
    """small_cnn and its head, holding the first model."""
    (first, colours), (second, width), classes = (
        task.initial[0].shape[:2],
        (task.initial[2].shape[0], task.initial[4].shape[0]),
        task.initial[6].shape[0],
    )
    model = nn.Sequential(
        *(nn.Conv2d(colours, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(task.initial[4].shape[1], width), nn.ReLU()),
        nn.Linear(width, classes),
    )
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), task.initial, strict=True):
            parameter.copy_(value)
    return model


class CountedSGD(torch.optim.SGD):
    """PyTorch's SGD; counts the steps of this process."""

    steps: ClassVar[int] = 0

    def step(self, closure: Any = None) -> Any:
        CountedSGD.steps += 1
        return super().step(closure)


def batches(samples: Samples, size: int, generator: torch.Generator) -> Iterator[Samples]:
    """One epoch in random order."""
    x, y = samples
    for rows in torch.randperm(len(y), generator=generator).split(size):
        yield x[rows], y[rows]


@torch.no_grad()
def accuracy(model: nn.Module, test: Samples) -> float:
    """Share of right answers."""
    x, y = test
    return float((model.eval()(x).argmax(dim=1) == y).float().mean())


def report(seconds: float, steps: int, final_accuracy: float, *packages: str) -> None:
    """Print what a peer did as JSON. seconds: of the rounds. packages: whose versions are told."""
    found = {
        "seconds": seconds,
        "steps": steps,
        "accuracy": final_accuracy,
        "versions": {package: version(package) for package in ("torch", *packages)},
    }
    print("\n" + json.dumps(found), flush=True)
