"""Features of fixed maps, computed once for each sample and looked up by the hash of its content.

The same sample has the same features whoever holds it, in whichever task, split or run. What is kept is what
the maps give before it is expanded, so that another expansion, head or schedule costs no pass through them.
A map sees batches of one shape only, the last one padded, because a library may choose another order of
additions for another shape.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.files import make_folder, one_at_a_time
from perennial.learning.batches import TrainingSet
from perennial.models.feature_maps.fixed import FixedFeatures

BATCH = 64
"""Samples that the maps see at once."""
ROWS = 4096
"""Samples whose features are handed on at once."""
KEY = 16
BANKS = 4


@dataclass(frozen=True)
class FeatureSet(TrainingSet):
    """Samples by their features: x is (n, d), and that is what a head sees."""

    def floats(self, x: Tensor) -> Tensor:
        return x


class FeatureBank:
    """Features by sample. folder: where they outlive this process; None: in memory alone."""

    def __init__(self, width: int, folder: Path | None) -> None:
        self._places: dict[bytes, int] = {}
        self._rows = np.empty((0, width), dtype=np.float32)
        self._folder, self._width = folder, width

    def features(self, backbone: FixedFeatures, data: TrainingSet) -> Iterator[tuple[Tensor, Tensor]]:
        """((b, d) features on the grid, (b,) labels) of all samples in order, on data's device."""
        for start in range(0, len(data), ROWS):
            part = slice(start, start + ROWS)
            keys = _keys(data.x[part])
            self._fill(backbone, data, keys, start)
            places = np.array([self._places[key] for key in keys])
            mapped = torch.from_numpy(np.ascontiguousarray(self._rows[places]))
            yield _in_fixed_batches(backbone.finished, mapped.to(data.x.device), backbone.width), data.y[part]

    def feature_set(self, backbone: FixedFeatures, data: TrainingSet) -> FeatureSet:
        """data with its features in place of its samples."""
        parts = [features for features, _ in self.features(backbone, data)]
        x = torch.cat(parts) if parts else torch.empty(0, backbone.width, device=data.x.device)
        return FeatureSet(x, data.y, data.mean, data.std)

    def _fill(self, backbone: FixedFeatures, data: TrainingSet, keys: list[bytes], start: int) -> None:
        """Compute the features of the samples from start that are not there."""
        missing = self._missing(keys)
        if missing and self._folder is not None:
            self._read_new()
            missing = self._missing(keys)
        if not missing:
            return
        rows = torch.tensor([start + place for place in missing.values()], device=data.x.device)
        inputs = (data.inputs(part) for part in rows.split(BATCH))
        found = [_padded(backbone.mapped, batch).cpu().numpy() for batch in inputs]
        self._keep(list(missing), np.concatenate(found))

    def _missing(self, keys: list[bytes]) -> dict[bytes, int]:
        return {key: place for place, key in enumerate(keys) if key not in self._places}

    def _keep(self, keys: list[bytes], rows: np.ndarray) -> None:
        if self._folder is None:
            self._places |= {key: len(self._rows) + place for place, key in enumerate(keys)}
            self._rows = np.concatenate([self._rows, rows])
            return
        make_folder(self._folder)
        with one_at_a_time(self._folder):
            count = self._stored()
            with open(self._rows_file, "r+b" if self._rows_file.exists() else "wb") as file:
                file.seek(count * self._width * 4)
                file.write(rows.tobytes())
            # a key is written after its row, so that a row that was cut short has none
            with open(self._keys_file, "r+b" if self._keys_file.exists() else "wb") as file:
                file.truncate(count * KEY)
                file.seek(count * KEY)
                file.write(b"".join(keys))
        self._read_new()

    def _read_new(self) -> None:
        """Read the keys that this or another process has stored since the last look."""
        count = self._stored()
        if count <= len(self._rows):
            return
        with open(self._keys_file, "rb") as file:
            file.seek(len(self._rows) * KEY)
            keys = file.read((count - len(self._rows)) * KEY)
        for place in range(count - len(self._rows)):
            self._places.setdefault(keys[place * KEY : (place + 1) * KEY], len(self._rows) + place)
        self._rows = np.memmap(self._rows_file, np.float32, "r", shape=(count, self._width))

    def _stored(self) -> int:
        """Samples whose key and row are both on the disk."""
        if not self._keys_file.exists() or not self._rows_file.exists():
            return 0
        rows = self._rows_file.stat().st_size // (self._width * 4)
        return min(self._keys_file.stat().st_size // KEY, rows)

    @property
    def _rows_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "rows.float32"

    @property
    def _keys_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "samples.blake2b"


_banks: dict[tuple[str, str, Path | None], FeatureBank] = {}


def bank_of(backbone: FixedFeatures, data: TrainingSet, folder: Path | None) -> FeatureBank:
    """The bank of a backbone's maps, kept in this process.

    folder: where it may be kept on disk, which maps that cost next to nothing do not use.
    """
    constants = hashlib.sha256(data.mean.cpu().numpy().tobytes() + data.std.cpu().numpy().tobytes())
    content, used = backbone.maps_content(constants.hexdigest()), folder if backbone.costly else None
    key = content, str(data.x.device), used
    if key not in _banks:
        while len(_banks) >= BANKS:
            del _banks[next(iter(_banks))]
        _banks[key] = FeatureBank(backbone.mapped_width, None if used is None else used / content[:32])
    return _banks[key]


def _keys(samples: Tensor) -> list[bytes]:
    rows = samples.cpu().contiguous().flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=KEY).digest() for row in rows]


@torch.no_grad()
def _padded(network: "torch.nn.Module | object", batch: Tensor) -> Tensor:
    """network's answers to a batch of at most BATCH samples, which it sees filled up with zeros."""
    room = torch.zeros(BATCH, *batch.shape[1:], dtype=batch.dtype, device=batch.device)
    room[: len(batch)] = batch
    return network(room)[: len(batch)]  # pyright: ignore[reportCallIssue]


def _in_fixed_batches(network: object, rows: Tensor, width: int) -> Tensor:
    out = torch.empty(len(rows), width, device=rows.device)
    for start in range(0, len(rows), BATCH):
        out[start : start + BATCH] = _padded(network, rows[start : start + BATCH])
    return out
