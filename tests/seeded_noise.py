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
from perennial.server.central_privacy import CentralPrivacy


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
def repeatable_noise(seed: int = 0) -> Iterator[None]:
    """Inside it this process's noise follows from the seed, the site, the round and the order of draws."""
    place = [("", 0, count())]

    def stream() -> CipherContext:
        site, number, drawn = place[0]
        key = sha256(f"{seed} {site} {number} {next(drawn)}".encode()).digest()
        return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    speak, finish = app.speak_of, CentralPrivacy.finish_round

    def spoken(**facts: Any) -> None:
        place[0] = (str(facts.get("site", "")), facts.get("round", 0), count())
        speak(**facts)

    def finished(self: CentralPrivacy, outcome: Any, number: int) -> None:
        place[0] = ("server", number, count())
        finish(self, outcome, number)

    with (
        patch("perennial.privacy.noise.new_stream", stream),
        patch.object(app, "speak_of", spoken),
        patch.object(CentralPrivacy, "finish_round", finished),
    ):
        yield
