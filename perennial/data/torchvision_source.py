"""The standard image benchmarks, through torchvision and from a local folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perennial.data.config import DataConfig, DatasetName
from perennial.data.images import conform
from perennial.data.samples import Samples, Source, constants
from perennial.foundation.errors import DataError
from perennial.foundation.torchvision_import import torchvision


@dataclass(frozen=True)
class _Dataset:
    """A standard data set of torchvision.

    mean, std: the constants of its training part that are in common use.
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


_DATASETS: dict[DatasetName, _Dataset] = {
    "cifar10": _Dataset("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Dataset("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": _Dataset("MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": _Dataset("FashionMNIST", (0.2860,), (0.3530,)),
    "emnist": _Dataset("EMNIST", (0.1736,), (0.3317,)),
}


def load_torchvision(config: DataConfig) -> Source:
    """uint8 (N, C, H, W) with the official test split. emnist is its split of 62 classes, ByClass.

    Raises DataError where the files are not in data.path and data.download is off, or downloading fails.
    """
    assert config.path is not None and config.dataset is not None
    chosen = _DATASETS[config.dataset]
    root = Path(config.path).expanduser()
    train, classes = _part(config, chosen, root, train=True)
    test, _ = _part(config, chosen, root, train=False)
    mean, std = chosen.mean, chosen.std
    if train.x.shape[1] == 1:
        mean, std = (float(np.mean(mean)),), (float(np.mean(std)),)
    return Source(train, test, classes, *constants(config.normalise, train.x, mean, std))


def _part(
    config: DataConfig, chosen: _Dataset, root: Path, *, train: bool
) -> tuple[Samples, tuple[str, ...]]:
    options: dict[str, Any] = {"split": "byclass"} if config.dataset == "emnist" else {}
    build = getattr(torchvision().datasets, chosen.name)
    try:
        dataset = build(str(root), train=train, download=config.download, **options)
    except (RuntimeError, OSError, ValueError) as error:
        remedy = "" if config.download else "; put its files there, or set data.download: true"
        raise DataError(f"{root}: {chosen.name} cannot be read from there ({error}){remedy}") from error
    pixels = torch.as_tensor(dataset.data)
    x = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    # EMNIST's files hold each letter with rows and columns exchanged.
    x = x.transpose(2, 3) if config.dataset == "emnist" else x
    y = torch.as_tensor(dataset.targets, dtype=torch.int64)
    return Samples(conform(x.contiguous(), config.size, config.color, config.resize), y), tuple(
        dataset.classes
    )
