"""Updates that wait for a second pass, on disk once they are many: memory does not grow with their number."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

PIECE_BYTES = 1 << 25
"""Memory of one piece of all updates."""
KEPT_BYTES = 1 << 26
"""Updates that stay in memory: of a small model a whole round's, for which files cost more than sums."""


@dataclass(frozen=True)
class Piece:
    """The same values of every update: start to stop of the flattened tensor `name`.

    rows: (K, stop - start) float64, one row for each site in the order of the sites' names.
    """

    name: str
    start: int
    stop: int
    rows: Tensor


class UpdateFile:
    """Updates of one round: the first ones in memory, the others in a nameless temporary file.

    The file is gone with the process, however that ends. like: name -> tensor; the shapes and dtypes of every
    update to come.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = like
        self._bytes = sum(each.numel() * each.element_size() for each in like.values())
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._offsets: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._kept) + len(self._offsets)

    @property
    def sites(self) -> list[str]:
        """Names of the sites whose updates are there, sorted."""
        return sorted([*self._kept, *self._offsets])

    def add(self, site: str, update: Mapping[str, Tensor]) -> None:
        """Store one site's update, which must not change afterwards. Raises OSError when the disk is full."""
        self._kept.pop(site, None)
        if (len(self._kept) + 1) * self._bytes <= KEPT_BYTES:
            self._kept[site] = {name: update[name].detach().cpu() for name in self._like}
            return
        offset = self._file.seek(0, 2)
        for name in self._like:
            update[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(self._file)
        self._offsets[site] = offset

    def __iter__(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(site, update) in the order of names; of those on disk one in memory at a time."""
        there = all(like.device.type == "cpu" for like in self._like.values())
        for site in self.sites:
            found = self._kept.get(site) or self._read_all(site)
            yield (
                site,
                found if there else {name: found[name].to(like.device) for name, like in self._like.items()},
            )

    def read_pieces(self) -> Iterator[Piece]:
        """Yield all updates side by side, a piece of the model at a time."""
        before, sites = 0, self.sites
        width = max(1, PIECE_BYTES // (8 * max(1, len(self))))
        for name, like in self._like.items():
            for start in range(0, like.numel(), width):
                stop = min(start + width, like.numel())
                rows = [
                    self._kept[site][name].reshape(-1)[start:stop]
                    if site in self._kept
                    else self._read(site, like, before + start * like.element_size(), stop - start)
                    for site in sites
                ]
                yield Piece(name, start, stop, torch.stack(rows).double())
            before += like.numel() * like.element_size()

    @cached_property
    def _file(self) -> BinaryIO:
        return cast(BinaryIO, tempfile.TemporaryFile())

    def _read(self, site: str, like: Tensor, start: int, count: int) -> Tensor:
        """count values of a site's update in the file, from a place in bytes."""
        self._file.seek(self._offsets[site] + start)
        data = np.fromfile(self._file, dtype=np.uint8, count=count * like.element_size())
        return torch.from_numpy(data).view(like.dtype)

    def _read_all(self, site: str) -> dict[str, Tensor]:
        update, before = {}, 0
        for name, like in self._like.items():
            update[name] = self._read(site, like, before, like.numel()).view(like.shape)
            before += like.numel() * like.element_size()
        return update
