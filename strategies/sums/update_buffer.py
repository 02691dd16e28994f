"""A round's updates on disk, for methods whose weights are known only when the last reply is in."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file
from torch import Tensor

from perennial.strategies.round.gate import Admitted


class UpdateBuffer:
    """Keeps updates in a folder of its own until it is closed: memory does not grow with the sites."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="perennial-round-")
        self._names: dict[str, str] = {}

    def put(self, reply: Admitted) -> None:
        """Keep a reply's update. Raises OSError when the disk is full."""
        name = f"{len(self._names)}.safetensors"
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in reply.update.items()}
        save_file(tensors, Path(self._folder.name) / name)
        self._names[reply.site] = name

    def updates(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """(site, update), one at a time, in the order of the sites' names."""
        for site, name in sorted(self._names.items()):
            yield site, load_file(Path(self._folder.name) / name)

    def close(self) -> None:
        self._folder.cleanup()
