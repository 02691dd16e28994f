"""Updates that wait on disk for a second pass, so that memory does not grow with the number of sites."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PIECE_BYTES = 1 << 25
"""Memory of one piece of all updates."""


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
    """A nameless temporary file of updates; it is gone with the process, however that ends.

    like: name -> tensor; the shapes and dtypes of every update to come.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = like
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed with this object
        self._offsets: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def sites(self) -> list[str]:
        """Whose updates are there, in the order of names and not of arrival."""
        return sorted(self._offsets)

    def add(self, site: str, update: Mapping[str, Tensor]) -> None:
        """Keep one site's update. Raises OSError when the disk is full."""
        offset = self._file.seek(0, 2)
        for name in self._like:
            update[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(self._file)
        self._offsets[site] = offset

    def __iter__(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(site, update) in the order of names, one in memory at a time."""
        for site in self.sites:
            self._file.seek(self._offsets[site])
            yield (
                site,
                {
                    name: self._read(like, like.numel()).reshape(like.shape).to(like.device)
                    for name, like in self._like.items()
                },
            )

    def pieces(self) -> Iterator[Piece]:
        """All updates side by side, a piece of the model at a time."""
        before = 0
        width = max(1, PIECE_BYTES // (8 * max(1, len(self))))
        for name, like in self._like.items():
            for start in range(0, like.numel(), width):
                stop = min(start + width, like.numel())
                rows = torch.empty(len(self), stop - start, dtype=torch.float64)
                for row, site in zip(rows, self.sites, strict=True):
                    self._file.seek(self._offsets[site] + before + start * like.element_size())
                    row.copy_(self._read(like, stop - start))
                yield Piece(name, start, stop, rows)
            before += like.numel() * like.element_size()

    def _read(self, like: Tensor, count: int) -> Tensor:
        data = np.fromfile(self._file, dtype=np.uint8, count=count * like.element_size())
        return torch.from_numpy(data).view(like.dtype)
