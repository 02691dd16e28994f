"""Masks: streams of uniform words from a seed, added to a vector modulo 2^32 or 2^64.

A mask is the key stream of AES-256-GCM under a nonce of zeros, which is AES-256 in counter mode from block 2
on; one fresh key makes one mask. The tag is not asked for: OpenSSL has vector instructions for this mode and
none for plain counter mode, so that it takes less than half the time. On one core a mask of 11 million 32-bit
words takes about 3 ms.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_CHUNK = 1 << 18
"""Bytes of a mask made at once: they and the piece that they are added to stay in the processor's cache."""
_BLOCK = 16
_NONCE = bytes(12)
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
    ciphers = [Cipher(algorithms.AES(seed), modes.GCM(_NONCE)).encryptor() for seed in seeds]
    for start in range(0, len(vector), words):
        piece = vector[start : start + words]
        for cipher in ciphers:
            cipher.update_into(zeros[: piece.nbytes], room)
            combine(piece, stream[: len(piece)], out=piece)
