"""Data for benchmarks: generated groups of sites, torchvision's standard sets, and scikit-learn's 8x8 digits.

Digits (Alpaydin and Kaynak 1998, doi 10.24432/C50P49) are read without importing scikit-learn, which takes
longer than a short run's first task. Generated groups have nuisance directions that only the whole group's
samples reveal: four groups of four sites; the classes of a group, and one class from elsewhere at each site,
lie under the group's mean and its own nuisance directions, which thirty samples of one site do not reveal.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perennial.data.config import DataConfig, DatasetName
from perennial.data.images import conform
from perennial.data.samples import Samples, Source, choose_constants
from perennial.foundation.errors import DataError
from perennial.foundation.streams import stream
from perennial.foundation.torchvision_import import import_torchvision

GROUPS, SITES_PER_GROUP, CLASSES_PER_GROUP = 4, 4, 4
TRAIN_SAMPLES, TEST_SAMPLES = 30, 100
SIDE = 8
PROTOTYPE_SCALE, GROUP_SCALE, NUISANCES, NOISE = 2.0, 1.6, 6, 0.05
COMMON_SHARE = 0.8


def load_synth_groups(config: DataConfig, seed: int) -> Source:
    """float32 (N, 1, 8, 8), 16 classes; sites "group-G-site-S" with 30 training and 100 test samples each.

    x = prototype of the class + mean of the group + sum_j a_j nuisance_j + noise, a_j ~ N(0, 1). A label is
    one of the group's classes with probability 0.8, else the one class that the site has from another group.
    """
    generator = stream(seed, "synth-groups")
    classes = GROUPS * CLASSES_PER_GROUP
    prototypes = PROTOTYPE_SCALE * _draw_fields(generator, classes)
    group_means = GROUP_SCALE * _draw_fields(generator, GROUPS)
    nuisances = _draw_fields(generator, GROUPS * NUISANCES).reshape(GROUPS, NUISANCES, SIDE, SIDE)
    group_of_site = np.repeat(np.arange(GROUPS), SITES_PER_GROUP)
    elsewhere = generator.integers(0, classes - CLASSES_PER_GROUP, len(group_of_site))
    extra = (CLASSES_PER_GROUP * (group_of_site + 1) + elsewhere) % classes

    count = TRAIN_SAMPLES + TEST_SAMPLES
    site = np.repeat(np.arange(len(group_of_site)), count)
    group = group_of_site[site]
    own = CLASSES_PER_GROUP * group + generator.integers(0, CLASSES_PER_GROUP, len(site))
    label = np.where(generator.random(len(site)) < COMMON_SHARE, own, extra[site])
    strength = generator.standard_normal((len(site), NUISANCES))
    noise = NOISE * generator.standard_normal((len(site), SIDE, SIDE))
    fields = (
        prototypes[label] + group_means[group] + np.einsum("nj,njhw->nhw", strength, nuisances[group]) + noise
    )

    everything = Samples(
        torch.from_numpy(fields[:, None].astype(np.float32)),
        torch.from_numpy(label),
        torch.from_numpy(site),
        tuple(
            f"group-{index // SITES_PER_GROUP}-site-{index % SITES_PER_GROUP}" for index in range(len(extra))
        ),
    )
    is_test = torch.from_numpy(np.tile(np.arange(count) >= TRAIN_SAMPLES, len(group_of_site)))
    train = everything.pick(torch.nonzero(~is_test).squeeze(1))
    test = everything.pick(torch.nonzero(is_test).squeeze(1))
    names = tuple(f"class-{index:02d}" for index in range(classes))
    return Source(train, test, names, *choose_constants(config.normalise, train.x, (0.0,), (1.0,)))


def _draw_fields(generator: np.random.Generator, count: int) -> np.ndarray:
    """(count, 8, 8) normal fields on the torus, averaged over 3x3 neighbours, each of unit L2 norm."""
    fields = generator.standard_normal((count, SIDE, SIDE))
    shifts = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    smooth = np.mean([np.roll(fields, shift, axis=(1, 2)) for shift in shifts], axis=0)
    return smooth / np.linalg.norm(smooth, axis=(1, 2), keepdims=True)


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
    train, classes = _load_part(config, chosen, root, train=True)
    test, _ = _load_part(config, chosen, root, train=False)
    mean, std = chosen.mean, chosen.std
    if train.x.shape[1] == 1:
        mean, std = (float(np.mean(mean)),), (float(np.mean(std)),)
    return Source(train, test, classes, *choose_constants(config.normalise, train.x, mean, std))


def _load_part(
    config: DataConfig, chosen: _Dataset, root: Path, *, train: bool
) -> tuple[Samples, tuple[str, ...]]:
    options: dict[str, Any] = {"split": "byclass"} if config.dataset == "emnist" else {}
    build = getattr(import_torchvision().datasets, chosen.name)
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


MEAN, STD = 0.3053, 0.3760


def load_digits(config: DataConfig) -> Source:
    """1797 samples, uint8 (N, 1, 8, 8), 0..16 stretched to 0..255; classes "0".."9"; no test part."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("data.source: 'digits' comes with scikit-learn, which is not installed")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise DataError(f"{path}: missing from the installed scikit-learn")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    x = conform(torch.from_numpy(pixels), config.size, config.color, config.resize)
    samples = Samples(x, torch.from_numpy(table[:, 64].astype(np.int64)))
    return Source(samples, None, tuple("0123456789"), *choose_constants(config.normalise, x, (MEAN,), (STD,)))
