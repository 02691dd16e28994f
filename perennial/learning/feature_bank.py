"""Features of fixed maps, computed once for each sample and looked up by the hash of its content.

The same sample has the same features whoever holds it, in whichever task, split or run. What is kept is what
the maps give before it is expanded, so that another expansion, head or schedule costs no pass through them.
A map sees batches of one shape only, the last one padded, because a library may choose another order of
additions for another shape. That shape follows from the device and the sample, never from free memory.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.cache import BoundedFolder
from perennial.foundation.files import lock_folder, make_folder
from perennial.foundation.site_log import log
from perennial.learning.batches import TrainingSet, hash_contents
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.privacy.sample_level import split_blocks

BATCH = 64
"""Samples that the maps see at once on a CPU, where larger batches are no faster."""
LARGEST_BATCH, BATCH_BYTES = 1024, 256 << 20
"""Samples that the maps see at once on another device: as many as this, while their inputs take no more."""
ROWS = 4096
"""Samples whose features are handed on at once."""
KEY = 16
BANKS = 4


@dataclass(frozen=True)
class FeatureSet(TrainingSet):
    """A training set whose samples are replaced by their features: x is (n, d), the input of a head."""

    def floats(self, x: Tensor) -> Tensor:
        return x


class FeatureBank:
    """Features of fixed maps, each computed once and kept by the hash of its sample.

    shared: a folder on disk in which they outlive this process, in the entry `name`; None: in memory alone.
    Other processes add to the entry. If one empties it, the bank goes on in memory, with what it has read.
    """

    def __init__(self, width: int, shared: BoundedFolder | None, name: str = "") -> None:
        self._places: dict[bytes, int] = {}
        self._rows = np.empty((0, width), dtype=np.float32)
        self._shared, self._width = shared, width
        self._folder = None if shared is None else shared.path / name
        self._begun = 0
        """Number of the file of rows that has been read: another one was begun anew."""

    def features(self, backbone: FixedFeatures, data: TrainingSet) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ((b, d) features on the grid, (b,) labels) for all samples in order, on data's device."""
        for start in range(0, len(data), ROWS):
            part = slice(start, start + ROWS)
            keys = hash_contents(data.x[part])
            self._fill(backbone, data, keys, start)
            places = np.array([self._places[key] for key in keys])
            mapped = torch.from_numpy(np.ascontiguousarray(self._rows[places]))
            mapped = mapped.to(data.x.device)
            found = torch.empty(len(mapped), backbone.width, device=data.x.device)
            for rows, places in _plan_batches(data, torch.arange(start, start + len(keys))):
                found[rows] = _run_padded(backbone.finished, mapped[rows], places, choose_batch_size(data.x))
            yield found, data.y[part]

    def build_feature_set(self, backbone: FixedFeatures, data: TrainingSet) -> FeatureSet:
        """The same training set with features in place of samples."""
        parts = [features for features, _ in self.features(backbone, data)]
        x = torch.cat(parts) if parts else torch.empty(0, backbone.width, device=data.x.device)
        return FeatureSet(x, data.y, data.mean, data.std, alone=data.alone)

    def _fill(self, backbone: FixedFeatures, data: TrainingSet, keys: list[bytes], start: int) -> None:
        """Compute the features of the samples from start that are not there."""
        missing = self._find_missing(keys)
        if missing and self._folder is not None:
            self._read_new()
            missing = self._find_missing(keys)
        if not missing:
            return
        samples = torch.tensor([start + place for place in missing.values()])
        found = torch.empty(len(samples), self._width, device=data.x.device)
        for rows, places in _plan_batches(data, samples):
            inputs = data.inputs(samples.to(data.x.device)[rows])
            found[rows] = _run_padded(backbone.map_inputs, inputs, places, choose_batch_size(data.x))
        self._keep(list(missing), found.cpu().numpy())

    def _find_missing(self, keys: list[bytes]) -> dict[bytes, int]:
        return {key: place for place, key in enumerate(keys) if key not in self._places}

    def _keep(self, keys: list[bytes], rows: np.ndarray) -> None:
        if not self._try_store(keys, rows):
            self._places |= {key: len(self._rows) + place for place, key in enumerate(keys)}
            self._rows = np.concatenate([self._rows, rows])

    def _try_store(self, keys: list[bytes], rows: np.ndarray) -> bool:
        """Whether these rows are on the disk now, and read from there."""
        if self._shared is None or self._folder is None:
            return False
        if not self._shared.make_room(self._folder, rows.nbytes + len(keys) * KEY):
            self._go_on_alone(f"no room below {self._shared.gigabytes:g} GB beside what is in use")
            return False
        try:
            make_folder(self._folder)
            with lock_folder(self._folder):
                self._add(keys, rows)
        except OSError as error:
            # a full disk, or one that this user may not write to: what can be made again stops no run
            self._go_on_alone(error.strerror or str(error))
            return False
        return self._read_new()

    def _add(self, keys: list[bytes], rows: np.ndarray) -> None:
        count = self._count_stored()
        with open(self._rows_file, "r+b" if self._rows_file.exists() else "wb") as file:
            file.seek(count * self._width * 4)
            file.write(rows.tobytes())
        # a key is written after its row, so that a row that was cut short has none
        with open(self._keys_file, "r+b" if self._keys_file.exists() else "wb") as file:
            file.truncate(count * KEY)
            file.seek(count * KEY)
            file.write(b"".join(keys))

    def _read_new(self) -> bool:
        """Read what this or another process has stored since the last look.

        False where the entry was emptied since then.
        """
        try:
            with open(self._rows_file, "rb") as rows, open(self._keys_file, "rb") as keys:
                # as long as a file is open or mapped, no other one has its number
                begun = os.fstat(rows.fileno()).st_ino
                if begun == os.stat(self._rows_file).st_ino and (begun == self._begun or not len(self._rows)):
                    self._read(rows, keys)
                    self._begun = begun
                    return True
        except FileNotFoundError:
            return False
        self._go_on_alone("another process removed what was there")
        return False

    def _read(self, rows: BinaryIO, keys: BinaryIO) -> None:
        count = min(_measure_size(rows) // (self._width * 4), _measure_size(keys) // KEY)
        if count <= len(self._rows):
            return
        keys.seek(len(self._rows) * KEY)
        for place in range(len(self._rows), count):
            self._places.setdefault(keys.read(KEY), place)
        self._rows = np.memmap(rows, np.float32, "r", shape=(count, self._width))

    def _go_on_alone(self, reason: str) -> None:
        """Keep what is known, and what comes, in this process."""
        log.warning("%s: %s; the features of this map stay in memory from now on", self._folder, reason)
        self._shared = self._folder = None

    def _count_stored(self) -> int:
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


_banks: dict[tuple[str, str, BoundedFolder | None], FeatureBank] = {}


def open_bank(backbone: FixedFeatures, data: TrainingSet, folder: BoundedFolder | None) -> FeatureBank:
    """The feature bank of a backbone's maps; a process keeps the latest few banks.

    folder: where features may be stored on disk, unless the maps are cheap to compute; None: in memory.
    """
    constants = hashlib.sha256(data.mean.cpu().numpy().tobytes() + data.std.cpu().numpy().tobytes())
    content, used = backbone.hash_maps(constants.hexdigest()), folder if backbone.costly else None
    # features whose last bits follow from the sample alone, and others, are kept apart
    name = content[:32] + ("-alone" if data.alone else "")
    key = name, str(data.x.device), used
    if key not in _banks:
        while len(_banks) >= BANKS:
            del _banks[next(iter(_banks))]
        _banks[key] = FeatureBank(backbone.mapped_width, used, name)
    if used is not None:
        used.mark_used(used.path / name)
    return _banks[key]


def choose_batch_size(samples: Tensor) -> int:
    """Samples that the maps see at once: BATCH on a CPU, else a power of two by the size of their inputs."""
    if samples.device.type == "cpu":
        return BATCH
    most = max(BATCH, min(LARGEST_BATCH, BATCH_BYTES // max(1, 4 * samples[0].numel())))
    return 1 << (most.bit_length() - 1)


def _measure_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _plan_batches(data: TrainingSet, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (which of the (n,) samples, their places in a batch), in order or as split_blocks() has it."""
    size, device = choose_batch_size(data.x), data.x.device
    blocks = split_blocks(data.places[samples] if data.alone else torch.arange(len(samples)), size)
    for block in blocks:
        places = (block >= 0).nonzero()[:, 0]
        yield block[places].to(device), places.to(device)


@torch.no_grad()
def _run_padded(network: "torch.nn.Module | object", batch: Tensor, places: Tensor, size: int) -> Tensor:
    """network's answers to a batch, which it sees at these places of `size`, filled up with zeros."""
    room = torch.zeros(size, *batch.shape[1:], dtype=batch.dtype, device=batch.device)
    room[places] = batch
    return network(room)[places]  # pyright: ignore[reportCallIssue]
