"""The sums from which a closed-form classifier follows: of features, and of products of two features.

Every feature is a multiple of 2^-16 and every sample's features have length 1 at most, so every product is a
multiple of 2^-32 of size 1 at most, and a sum over up to 2^20 samples is exact in double precision, in
whatever order and blocking a library adds. Beyond, sums are 64-bit integers of such steps: exact up to 2^31
samples. So the sums have the same bits however the samples are divided. Files hold
a site's sums of one task, and those of records that it withdraws.

Shapes: D width of the features with the constant that is appended, C classes, n samples.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from perennial.foundation.errors import ConfigError, DataError, StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.tensor_file import yield_pieces
from perennial.models.feature_maps.projection import CONSTANT_STEPS, GRID, shrink_to_radius

PRODUCT = GRID * GRID
"""Steps in 1 of a product of two features."""
EXACT_SAMPLES = 1 << 20
"""Samples whose sums are exact in double precision."""
WEIGHT = 1 << 20
"""Steps in 1 of a class's weight."""
MOST_STEPS = 1 << 62
WIDEST = 10_000
"""Features beyond which the matrix of products (8 D^2 bytes) is refused."""


def require_width(width: int) -> None:
    """Raise ConfigError if `width`, features with the constant, is more than can be solved for."""
    if width > WIDEST:
        gigabytes = 8 * width * width / 1e9
        raise ConfigError(
            f"model.features: they have {width} values with the constant, whose matrix of products has "
            f"{gigabytes:.1f} GB and is solved in {width}^3 / 3 steps; allowed {WIDEST} or fewer"
        )


@dataclass(frozen=True)
class SumsForm:
    """The tensors of a site's sums. width: of a row. products: whether it sends sums of products."""

    width: int
    products: bool = True

    def list_shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name, for so many classes."""
        products = self.width * (self.width + 1) // 2 if self.products else 0
        return {"gram": (products,), "sums": (classes, self.width), "counts": (classes,)}

    def bytes(self, classes: int) -> int:
        """Size of the sums over so many classes as they are stored; a message has fewer (compact.py)."""
        return 8 * sum(math.prod(shape) for shape in self.list_shapes(classes).values())


@dataclass(frozen=True)
class Statistics:
    """Exact sums over samples of some classes.

    gram: (D (D + 1) / 2,) int64, upper triangle of sum phi phi^T, row by row, in steps of 2^-32.
    sums: (C, D) int64, sum of phi over each class, in steps of 2^-16. counts: (C,) int64.
    classes: the labels that the rows of sums and counts stand for.
    Weighted statistics count each sample of class c w_c times, in counts too. Sums to which noise is added
    are of features without the constant; once noised, gram may be empty, and counts are in steps of 2^-16.
    """

    gram: Tensor
    sums: Tensor
    counts: Tensor
    classes: range

    @classmethod
    def build_empty(cls, width: int, classes: range) -> "Statistics":
        """Statistics of no sample: all zeros. width: D."""
        return cls(
            torch.zeros(width * (width + 1) // 2, dtype=torch.int64),
            torch.zeros(len(classes), width, dtype=torch.int64),
            torch.zeros(len(classes), dtype=torch.int64),
            classes,
        )

    @property
    def width(self) -> int:
        return self.sums.shape[1]

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def over(self, classes: range) -> "Statistics":
        """The same sums with zero rows for more classes. Raises DataError if `classes` lacks its own."""
        if classes == self.classes:
            return self
        if not (classes.start <= self.classes.start and self.classes.stop <= classes.stop):
            raise DataError(f"statistics of classes {self.classes}: cannot stand among {classes}")
        first = self.classes.start - classes.start
        rows = slice(first, first + len(self.classes))
        sums = torch.zeros(len(classes), self.width, dtype=torch.int64)
        counts = torch.zeros(len(classes), dtype=torch.int64)
        sums[rows], counts[rows] = self.sums, self.counts
        return Statistics(self.gram, sums, counts, classes)

    def limit_to_classes(self, stop: int) -> "Statistics":
        """The same sums without the rows of classes from `stop` on, of which there are no samples."""
        classes = range(self.classes.start, min(stop, self.classes.stop))
        return replace(
            self, sums=self.sums[: len(classes)], counts=self.counts[: len(classes)], classes=classes
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        a, b = _align(self, other)
        return replace(a, gram=a.gram + b.gram, sums=a.sums + b.sums, counts=a.counts + b.counts)

    def __sub__(self, other: "Statistics") -> "Statistics":
        """What remains of these sums without those of some of their samples."""
        a, b = _align(self, other)
        return replace(a, gram=a.gram - b.gram, sums=a.sums - b.sums, counts=a.counts - b.counts)

    @property
    def sha256(self) -> str:
        """Hash of the sums, their width and their classes; equal for equal sums."""
        digest = hashlib.sha256(f"{self.width} {self.classes.start} {self.classes.stop}".encode())
        for tensor in (self.gram, self.sums, self.counts):
            digest.update(tensor.contiguous().numpy().astype("<i8", copy=False).data)
        return digest.hexdigest()


class Collector:
    """Adds up samples, a batch at a time, in the memory of one matrix (D, D).

    The sums are exact in any order of addition, so a GPU gives the same bits.
    """

    def __init__(
        self, width: int, classes: range, *, constant: bool = True, device: torch.device | None = None
    ) -> None:
        """Begin with no samples. width: features without the constant.

        constant: whether to append it; without it every sample's features have length 1/sqrt(2) at most,
        which noise is sized by. device: a CUDA GPU adds; with any other or None the processor does.
        """
        require_width(width + constant)
        self.classes, self._rows = classes, append_constant if constant else omit_constant
        self._width = width + constant
        self._settled: Statistics | None = None
        self._device = choose_adding_device(device)
        exact: Any = {"dtype": torch.float64, "device": self._device}
        self._gram = torch.zeros(self._width, self._width, **exact)
        self._sums = torch.zeros(len(self.classes), self._width, **exact)
        self._counts = torch.zeros(len(self.classes), dtype=torch.int64, device=self._device)
        self._added = 0

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add some samples to the sums.

        features: (n, D - 1) float32 as on_grid gives them. labels: (n,) int64, all among the classes.
        Raises DataError if a feature is no multiple of the grid's step, or a row is too long.
        """
        for start in range(0, len(labels), EXACT_SAMPLES):
            part = slice(start, start + EXACT_SAMPLES)
            phi = self._rows(features[part].to(self._device))
            if self._added + len(phi) > EXACT_SAMPLES:
                self._settle()
            _add_products(self._gram, phi)
            held = labels[part].to(self._device) - self.classes.start
            self._sums.index_add_(0, held, phi)
            self._counts.add_(torch.bincount(held, minlength=len(self.classes)))
            self._added += len(phi)

    def finish(self) -> Statistics:
        """The sums of everything added, as Statistics."""
        sums = (self._sums * GRID).to(torch.int64).cpu()
        latest = Statistics(pack_triangle(self._gram.cpu()), sums, self._counts.cpu(), self.classes)
        return latest if self._settled is None else self._settled + latest

    def _settle(self) -> None:
        self._settled = self.finish()
        self._gram.zero_()
        self._sums.zero_()
        self._counts = torch.zeros_like(self._counts)
        self._added = 0


def sum_weighted(parts: Iterable[tuple[Statistics, int]], width: int, classes: range) -> Statistics:
    """Sum over classes c of w_c (sums over class c), exact. parts: (sums over one class, w_c) each; width: D.

    Raises DataError if a sum could leave the range of 64-bit integers.
    """
    total = Statistics.build_empty(width, classes)
    room = MOST_STEPS
    for part, weight in parts:
        room -= weight * part.samples * PRODUCT
        if room < 0:
            raise DataError("weighted statistics: found sums of 2^62 steps or more; allowed fewer")
        scaled = replace(
            part, gram=part.gram * weight, sums=part.sums * weight, counts=part.counts * weight
        ).over(classes)
        total.gram.add_(scaled.gram)
        total.sums.add_(scaled.sums)
        total.counts.add_(scaled.counts)
    return total


def append_constant(features: Tensor) -> Tensor:
    """(n, D) float64: the features and the constant, checked to lie on the grid and in the unit ball."""
    shape = len(features), features.shape[1] + 1
    phi = torch.empty(shape, dtype=torch.float64, device=features.device)
    phi[:, :-1] = _check_grid(features.double())
    phi[:, -1] = CONSTANT_STEPS / GRID
    if len(phi) and float(phi.square().sum(dim=1).max()) > 1:
        raise DataError("features: found a sample of length above 1 with the constant; allowed on_grid's")
    return phi


def omit_constant(features: Tensor) -> Tensor:
    """(n, D) float64: the features alone, of length 1/sqrt(2) at most, on which the size of noise relies."""
    return shrink_to_radius(_check_grid(features.double()))


def _check_grid(features: Tensor) -> Tensor:
    steps = features * GRID
    if not torch.equal(steps, steps.trunc()):
        raise DataError("features: found a value that is no multiple of 2^-16 (or NaN); allowed on_grid's")
    return features


def pack_triangle(gram: Tensor) -> Tensor:
    """(D (D + 1) / 2,) int64 upper triangle of a (D, D) float64 matrix, row by row, in steps of 2^-32."""
    width = len(gram)
    triangle = torch.empty(width * (width + 1) // 2, dtype=torch.int64)
    start = 0
    for row in range(width):
        end = start + width - row
        triangle[start:end] = gram[row, row:] * PRODUCT
        start = end
    return triangle


def unpack_triangle(triangle: Tensor, width: int) -> Tensor:
    """(D, D) float64 symmetric matrix of a triangle that packed() made."""
    gram = torch.empty(width, width, dtype=torch.float64)
    start = 0
    for row in range(width):
        end = start + width - row
        values = triangle[start:end].double() / PRODUCT
        gram[row, row:] = values
        gram[row:, row] = values
        start = end
    return gram


def choose_adding_device(device: torch.device | None) -> torch.device:
    """The device that adds sums and solves heads: `device` if it is a CUDA GPU, else the processor."""
    return device if device is not None and device.type == "cuda" else torch.device("cpu")


def _add_products(gram: Tensor, phi: Tensor) -> None:
    """gram += phi^T phi, at least its upper triangle. gram (D, D), phi (n, D) float64, row-major."""
    if phi.device.type == "cpu":
        _add_upper_triangle(gram, phi)
    else:
        add_all_products(gram, phi)


def add_all_products(gram: Tensor, phi: Tensor) -> None:
    """gram += phi^T phi on any device: twice the work of a triangle, which a GPU does in less time."""
    gram.addmm_(phi.T, phi)


def _add_upper_triangle(gram: Tensor, phi: Tensor) -> None:
    from scipy.linalg import get_blas_funcs

    syrk: Any = get_blas_funcs("syrk", dtype="float64")
    # row-major memory is column-major memory of the transposed matrix: its lower triangle is our upper one
    syrk(1.0, phi.numpy().T, 1.0, gram.numpy().T, lower=1, overwrite_c=1)


def _align(a: Statistics, b: Statistics) -> tuple[Statistics, Statistics]:
    if a.width != b.width:
        raise DataError(f"statistics: found {a.width} and {b.width} features; allowed the same number")
    classes = range(min(a.classes.start, b.classes.start), max(a.classes.stop, b.classes.stop))
    return a.over(classes), b.over(classes)


PARTS = ("gram", "sums", "counts")


def write_statistics(path: Path, statistics: Statistics, facts: Mapping[str, Any]) -> None:
    """Keep statistics, whole or not at all. facts: JSON-able."""
    make_folder(path.parent)
    _write(path, _prefix_tensors(statistics, ""), {**facts, "classes": _list_bounds(statistics)})


def read_statistics_file(path: Path) -> tuple[Statistics, dict[str, Any]]:
    """(statistics, facts) of a file. Raises StateError naming it when it is missing or damaged."""
    tensors, facts = _read(path)
    try:
        return _build_statistics(tensors, "", facts["classes"]), facts
    except (KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path}: missing or damaged ({error!r})") from error


def write_by_task(path: Path, by_task: Mapping[int, Statistics], facts: Mapping[str, Any]) -> None:
    """Write the statistics of several tasks to one file, whole or not at all. facts: JSON-able."""
    tensors = {k: t for task, part in by_task.items() for k, t in _prefix_tensors(part, f"{task}/").items()}
    tasks = {str(task): _list_bounds(part) for task, part in by_task.items()}
    _write(path, tensors, {**facts, "tasks": tasks})


def read_by_task(path: Path) -> tuple[dict[int, Statistics], dict[str, Any]]:
    """(task -> statistics, facts) of a file. Raises StateError naming it when it is missing or damaged."""
    tensors, facts = _read(path)
    try:
        found = {int(task): _build_statistics(tensors, f"{task}/", b) for task, b in facts["tasks"].items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StateError(f"{path}: missing or damaged ({error!r})") from error
    return found, facts


def _list_bounds(statistics: Statistics) -> list[int]:
    return [statistics.classes.start, statistics.classes.stop]


def _prefix_tensors(statistics: Statistics, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{part}": getattr(statistics, part) for part in PARTS}


def _build_statistics(tensors: Mapping[str, Tensor], prefix: str, bounds: list[int]) -> Statistics:
    first, end = bounds
    gram, sums, counts = (tensors[f"{prefix}{part}"] for part in PARTS)
    return Statistics(gram, sums, counts, range(first, end))


def _write(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    replace_file(path, yield_pieces(tensors, {"facts": json.dumps(facts)}))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            return {key: file.get_tensor(key) for key in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path}: missing or damaged ({error})") from error
