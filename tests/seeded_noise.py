"""Noise that tests can repeat; the product has no such thing."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from perennial.client import app
from perennial.privacy.noise import Noise
from perennial.server.preflight import CentralPrivacy


class SeededNoise(Noise):
    """Draws from a generator in place of the system's source."""

    def __init__(self, generator: np.random.Generator | int) -> None:
        self._generator = np.random.default_rng(generator)

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(shape)).mul_(std)

    def uniform(self, count: int) -> Tensor:
        return torch.from_numpy(1.0 - self._generator.random(count))

    def words(self, count: int) -> NDArray[np.uint64]:
        return self._generator.integers(0, 2**64 - 1, count, dtype=np.uint64, endpoint=True)


@contextmanager
def repeatable_noise() -> Iterator[None]:
    """Inside it this process's noise follows from site and order of draws in one answer."""
    place: list[Any] = ["", count()]

    def stream() -> CipherContext:
        key = sha256(f"{place[0]} {next(place[1])}".encode()).digest()
        return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    speak, finish = app.speak_of, CentralPrivacy.finish_round

    def spoken(**facts: Any) -> None:
        place[:] = [facts.get("site", ""), count()]
        speak(**facts)

    def finished(self: CentralPrivacy, outcome: Any) -> None:
        place[:] = ["server", count()]
        finish(self, outcome)

    with (
        patch("perennial.privacy.noise.open_stream", stream),
        patch.object(app, "speak_of", spoken),
        patch.object(CentralPrivacy, "finish_round", finished),
    ):
        yield
