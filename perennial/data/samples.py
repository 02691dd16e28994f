"""What every source delivers: samples with raw labels, and the names and constants that go with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from perennial.data.config import ArrayRole, DataConfig, NormaliseConfig
from perennial.data.splits import group_by_content
from perennial.foundation.errors import ConfigError, DataError, suggest_nearest

# Public constants for images whose source publishes none: nothing about anybody's data is in them, and they
# bring natural images to about zero mean and unit spread.
IMAGE_MEAN, IMAGE_STD = 0.5, 0.25
Stored = Literal["uint8", "float32"]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with their raw labels.

    x: uint8 (N, C, H, W), or float32 (N, C, H, W) or (N, D); contiguous.
    y: (N,) int64 raw labels.
    site: (N,) int64 index into site_names, where the data names the sites.
    keys: the source's name of each sample (such as a path), where it has names.
    groups: (N, 32) uint8, what decides the part that a sample falls into (data/splits.py), where that is not
    its x.
    patients: whether groups are patients.
    subgroup: (N,) int64 index into data.subgroup.values, -1 for another value; None without data.subgroup.
    """

    x: Tensor
    y: Tensor
    site: Tensor | None = None
    site_names: tuple[str, ...] = ()
    keys: tuple[str, ...] | None = None
    groups: np.ndarray | None = None
    patients: bool = False
    subgroup: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def pick(self, rows: Tensor) -> "Samples":
        """The samples at rows (int64), copied."""
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            site=None if self.site is None else self.site[rows],
            keys=None if self.keys is None else tuple(self.keys[row] for row in rows.tolist()),
            groups=None if self.groups is None else self.groups[rows.numpy()],
            subgroup=None if self.subgroup is None else self.subgroup[rows.numpy()],
        )

    def split_groups(self) -> np.ndarray:
        """(N, 32) uint8: the group by which each sample's part is decided (data/splits.py)."""
        return group_by_content(self.x) if self.groups is None else self.groups


def join_samples(one: Samples, other: Samples) -> Samples:
    """The samples of both, of one source, the first ones first; what only one of them has is dropped."""
    both = (one, other)
    keys = [part.keys for part in both if part.keys is not None]
    sites = [part.site for part in both if part.site is not None]
    return replace(
        one,
        x=torch.cat([part.x for part in both]),
        y=torch.cat([part.y for part in both]),
        site=torch.cat(sites) if len(sites) == 2 else None,
        keys=(*keys[0], *keys[1]) if len(keys) == 2 else None,
        groups=np.concatenate([part.split_groups() for part in both]),
        patients=one.patients and other.patients,
        subgroup=join_subgroups(both),
    )


def find_subgroups(texts: Sequence[str], config: DataConfig) -> np.ndarray | None:
    """(N,) index of each text in data.subgroup.values, -1 if it is not there; None without data.subgroup."""
    if config.subgroup is None:
        return None
    index = {value: place for place, value in enumerate(config.subgroup.values)}
    return np.array([index.get(text.strip(), -1) for text in texts], dtype=np.int64)


def join_subgroups(parts: Sequence[Samples]) -> np.ndarray | None:
    """(N,) subgroups of all parts, one part after the other; None if a part has none."""
    found = [part.subgroup for part in parts if part.subgroup is not None]
    return np.concatenate(found) if len(found) == len(parts) else None


@dataclass(frozen=True, eq=False)
class Source:
    """What a data source delivers: samples, class names and constants for normalisation.

    classes: names; a raw label is an index into them.
    test: the official test split, where there is one.
    mean, std: (C,) or (D,) float32 constants of (x - mean) / std, after 8-bit images are scaled to 0..1; NaN
    where the experiment has none, so that the training part of a simulation decides.
    columns: of a table, feature column -> "numeric", "date" or its categories, as used.
    fill: (D,) what stands for a missing number of a table, NaN where the training part
    decides; None: the mean.
    notes: what a person should know about what was read.
    """

    train: Samples
    test: Samples | None
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    columns: dict[str, str | tuple[str, ...]] | None = None
    notes: tuple[str, ...] = ()
    fill: Tensor | None = None

    @staticmethod
    def of(x: Any, y: Any = None, *, test: Any = None, **arrays: Any) -> "Arrays":
        """Data in memory as the data of run().

        Args:
            x: (N, D) numbers, or uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W); or, without y, a
                dataset of samples and labels, as data/datasets.py takes them.
            y: (N,) integers or names.
            test: a dataset of the official test split, where x is one.
            arrays: site and patient, (N,); classes and site_names; x_test, y_test, site_test, patient_test.

        Raises:
            DataError: names what was found and what is taken.
        """
        if wrong := sorted({*arrays} - {*get_args(ArrayRole)}):
            close = suggest_nearest(wrong[0], get_args(ArrayRole))
            raise DataError(f"Source.of: found {wrong[0]}{close}; allowed: {', '.join(get_args(ArrayRole))}")
        if y is not None:
            if test is not None:
                raise DataError("Source.of: test goes with a dataset; with arrays give x_test and y_test")
            return Arrays({"x": x, "y": y, **arrays})
        from perennial.data.datasets import extract_arrays

        found = extract_arrays(x)
        if test is not None:
            held = extract_arrays(test)
            found |= {"x_test": held["x"], "y_test": held["y"]}
        return Arrays({**found, **arrays})


@dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays by the names that an .npz file of data has (data/npz.py, which checks them)."""

    by_name: dict[str, Any]

    def write(self, path: Path) -> dict[str, Any]:
        """Write the arrays to an .npz file for resumed runs; returns the `data` block that reads it."""
        arrays = {
            name: np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
            for name, array in self.by_name.items()
            if array is not None
        }
        for name, array in arrays.items():
            if array.dtype == object and (lacking := [*filter(_is_missing, array.flat)]):
                raise DataError(f"Source.of: {name}: found {lacking[0]}, allowed a name or number for each")
            # names in a list of objects, as pandas gives them; NumPy would pickle these
            arrays[name] = array.astype(np.str_) if array.dtype == object else array
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, **arrays)
        natural = {"partition": {"kind": "natural"}} if "site" in arrays else {}
        return {"source": "npz", "path": str(path.resolve()), **natural}


def _is_missing(value: Any) -> bool:
    """None, or the NaN that pandas writes for a missing name."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def choose_constants(
    normalise: NormaliseConfig | None, x: Tensor, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> tuple[Tensor, Tensor]:
    """(mean, std), each (x.shape[1],): the configured ones, else the source's own, else the default.

    The default is public constants for 8-bit images, and NaN for floats.
    Raises ConfigError where the number of constants is neither 1 nor x.shape[1].
    """
    width = x.shape[1]
    if normalise is not None:
        chosen = (normalise.mean, normalise.std)
    elif mean:
        chosen = (mean, std)
    elif x.dtype == torch.uint8:
        chosen = (IMAGE_MEAN, IMAGE_STD)
    else:
        chosen = (float("nan"), float("nan"))
    values = []
    for name, value in zip(("mean", "std"), chosen, strict=True):
        assert not isinstance(value, dict)
        given = np.atleast_1d(np.asarray(value, dtype=np.float32))
        if len(given) not in (1, width):
            what = "channels" if x.ndim == 4 else "features"
            raise ConfigError(f"data.normalise.{name}: {len(given)} values, but the data has {width} {what}")
        values.append(torch.from_numpy(np.broadcast_to(given, width).copy()))
    return values[0], values[1]


def find_stored_type(x: Tensor) -> Stored:
    """The number type in which samples are stored: uint8 pixels or float32 values.

    Pixels are scaled to 0..1 before they are standardised; float32 values are in a scale of the data's own.
    """
    return "uint8" if x.dtype == torch.uint8 else "float32"


def select_classes(source: Source, names: tuple[str, ...] | None) -> Source:
    """Only the classes that an experiment lists, in its order; for sources whose classes are fixed.

    Raises DataError naming a class that the source does not have.
    """
    if names is None or names == source.classes:
        return source
    for name in names:
        if name not in source.classes:
            raise DataError(
                f"data.classes: {name!r} is not in the data{suggest_nearest(name, source.classes)}"
            )
    index = {name: position for position, name in enumerate(names)}
    new_label = torch.tensor([index.get(name, -1) for name in source.classes])

    def select_rows(samples: Samples) -> Samples:
        labels = new_label[samples.y]
        rows = torch.nonzero(labels >= 0).squeeze(1)
        return replace(samples.pick(rows), y=labels[rows])

    return replace(
        source,
        train=select_rows(source.train),
        test=select_rows(source.test) if source.test is not None else None,
        classes=names,
    )


def fill_missing(x: Tensor, fill: Tensor) -> None:
    """Replace NaN in a table, x (N, D), by fill (D,), in place; images stay as they are."""
    if x.ndim == 2 and x.is_floating_point():
        torch.where(x.isnan(), fill, x, out=x)
