"""Updates that wait on disk for a second pass, so that memory does not grow with the number of sites."""

import tempfile
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor


class UpdateFile:
    """A nameless temporary file of updates; it is gone with the process, however that ends.

    like: name -> tensor; the shapes and dtypes of every update to come.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = like
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, closed with this object
        self._offsets: dict[str, int] = {}

    def add(self, site: str, update: Mapping[str, Tensor]) -> None:
        """Keep one site's update. Raises OSError when the disk is full."""
        self._offsets[site] = self._file.seek(0, 2)
        for name in self._like:
            update[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(self._file)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(site, update) in the order of names, one in memory at a time."""
        for site, offset in sorted(self._offsets.items()):
            self._file.seek(offset)
            yield site, {name: self._read(tensor) for name, tensor in self._like.items()}

    def _read(self, like: Tensor) -> Tensor:
        data = np.fromfile(self._file, dtype=np.uint8, count=like.numel() * like.element_size())
        return torch.from_numpy(data).view(like.dtype).reshape(like.shape).to(like.device)
