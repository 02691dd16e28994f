"""Masks: streams of uniform words from a seed, added to a vector modulo 2^32 or 2^64.

A mask is AES-256 in counter mode over zeros. One fresh key makes one mask, so the counter starts at zero. On
one core with AES instructions a mask of 11 million 32-bit words takes about 7 ms.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_CHUNK = 1 << 18
"""Bytes of a mask made at once: they and the piece that they are added to stay in the processor's cache."""
_BLOCK = 16
Words = NDArray[Any]
"""(N,) uint32 or uint64."""


def add_masks(vector: Words, seeds: Iterable[bytes], *, subtract: bool = False) -> None:
    """Add (or subtract) the mask of each seed to vector, in place, modulo 2^bits of its words.

    All masks go over one piece of the vector before the next, so that memory is passed over once.

    vector: (N,) uint32 or uint64, contiguous. seeds: 32 bytes each.
    """
    words = _CHUNK // vector.itemsize
    zeros = memoryview(bytes(_CHUNK))
    # the cipher asks for room for one block more than it writes
    room = bytearray(_CHUNK + _BLOCK)
    stream = np.frombuffer(room, dtype=vector.dtype.newbyteorder("<"), count=words)
    combine = np.subtract if subtract else np.add
    ciphers = [Cipher(algorithms.AES(seed), modes.CTR(bytes(_BLOCK))).encryptor() for seed in seeds]
    for start in range(0, len(vector), words):
        piece = vector[start : start + words]
        for cipher in ciphers:
            cipher.update_into(zeros[: piece.nbytes], room)
            combine(piece, stream[: len(piece)], out=piece)
