"""Noise from the operating system's secure source.

A guarantee holds against whoever cannot predict the noise. A general-purpose generator can be reconstructed
from its output, and a seed that the server knows can simply be replayed; so a release draws from AES-256 in
counter mode under a key from os.urandom. The key lives for one call: a forked process never repeats its
parent's noise.

Floating point has a second hole: the low bits of one sampled Gaussian betray which inputs can have produced
it. Each value here is the sum of four independent Gaussians divided by 2, which puts the inversion out of
reach, and the sum with the data is formed in float64 before it is rounded once to float32.

Holohan and Braghin 2021 (arXiv 2107.10138, section 5.1, n = 2, as in Opacus's secure mode); Mironov 2012.
"""

import math
import os

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from perennial.foundation.devices import to_device

_SUMMANDS = 4
_MANTISSA = (1 << 52) - 1
_ONE = 0x3FF << 52
"""Sign and exponent of the floating-point numbers from 1 up to 2."""
_CHUNK = 1 << 13


def open_stream() -> CipherContext:
    """A keystream under a fresh key from the system: the one place from which noise is drawn.

    Use it for one call and keep it nowhere: a copy in a forked process would give the same stream again.
    """
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


class Noise:
    """Noise and secret choices from the system's secure source. No draw can be repeated, on purpose."""

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Each value is the sum of four Gaussians / 2, from four different Box-Muller pairs."""
        count = math.prod(shape)
        values = torch.empty(count + count % 2, dtype=torch.float64)
        words = _Words(2 * _SUMMANDS * min(_CHUNK, len(values) // 2))
        other = torch.empty(_SUMMANDS * min(_CHUNK, len(values) // 2), dtype=torch.float64)
        for chunk in values.split(2 * _CHUNK):
            pairs = len(chunk) // 2
            uniform = words.uniform(2 * _SUMMANDS * pairs).view(2, _SUMMANDS, pairs)
            radius = uniform[0].log_().mul_(-2).sqrt_()
            angle = uniform[1].mul_(2 * math.pi)
            cosine = torch.cos(angle, out=other[: _SUMMANDS * pairs].view(_SUMMANDS, pairs))
            torch.sum(cosine.mul_(radius), dim=0, out=chunk[:pairs])
            torch.sum(angle.sin_().mul_(radius), dim=0, out=chunk[pairs:])
        return values[:count].mul_(std / math.sqrt(_SUMMANDS)).view(shape)

    def uniform(self, count: int) -> Tensor:
        """Multiples of 2**-52, so that a logarithm is finite and the tail reaches 8.4 standard deviations."""
        return _Words(count).uniform(count)

    def draw_words(self, count: int) -> NDArray[np.uint64]:
        """(count,) independent uniform 64-bit words, for discrete noise."""
        return np.frombuffer(open_stream().update(bytes(8 * count)), dtype=np.uint64)


class _Words:
    """The stream of one key, drawn into memory that is used again, so that it stays in the cache."""

    def __init__(self, most: int) -> None:
        """most: numbers in one draw."""
        self._cipher = open_stream()
        self._zeros = memoryview(bytes(8 * most))
        # the cipher asks for room for one block more than it writes
        room = bytearray(8 * most + 16)
        self._room = memoryview(room)
        self._words = torch.frombuffer(room, dtype=torch.int64)

    def uniform(self, count: int) -> Tensor:
        """(count,) in (0, 1], overwritten by the next draw."""
        if count == 0:
            return torch.empty(0, dtype=torch.float64)
        self._cipher.update_into(self._zeros[: 8 * count], self._room)
        # random bits as the fraction of a number in [1, 2): no conversion, and every number as likely
        words = self._words[:count].bitwise_and_(_MANTISSA).bitwise_or_(_ONE)
        return words.view(torch.float64).neg_().add_(2)


def add_noise(vector: Tensor, std: float, source: Noise) -> None:
    """Add N(0, std^2) to each coordinate of vector, in place; std 0 changes nothing.

    vector: (P,) float, on any device. The sum is formed in float64 and rounded once.
    """
    if std == 0:
        return
    for chunk in vector.split(1 << 20):
        noise = to_device(source.normal(tuple(chunk.shape), std), chunk.device)
        chunk.copy_(noise.add_(chunk))


def add_laplace(vector: Tensor, scale: float, source: Noise) -> None:
    """Add Laplace(0, scale) to each coordinate of vector, in place; scale 0 changes nothing.

    A difference of two exponentials, each half the square of a Gaussian pair, so the floating-point defence
    of the source carries over. Holohan and Braghin 2021 (arXiv 2107.10138, section 4).
    """
    if scale == 0:
        return
    for chunk in vector.split(1 << 18):
        squares = to_device(source.normal((4, *chunk.shape), 1.0).square_(), chunk.device)
        chunk.copy_((squares[0] + squares[1] - squares[2] - squares[3]).mul_(scale / 2).add_(chunk))
