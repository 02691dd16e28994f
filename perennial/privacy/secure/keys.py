"""Keys, seeds and signatures, from the primitives of `cryptography` alone.

X25519 agrees on a secret, HKDF-SHA256 makes a key of it for one purpose, AES-256-GCM seals what travels
between two sites, Ed25519 signs. Keys travel as hexadecimal digits.
"""

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from perennial.foundation.errors import ProtocolError

KEY_BYTES = 32
_NONCE_BYTES = 12


def join_parts(*parts: str | int | bytes) -> bytes:
    """The parts, each after its length, so that different lists never give the same bytes."""
    pieces = []
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        pieces += [len(content).to_bytes(8, "big"), content]
    return b"".join(pieces)


def draw_secret() -> bytes:
    """32 bytes from the operating system's secure source: a private key or a seed."""
    return os.urandom(KEY_BYTES)


def derive_agreement_key(secret: bytes) -> str:
    """The public X25519 key of a private one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()


def derive_signing_key(secret: bytes) -> str:
    """The public Ed25519 key of a private one: a site's identity."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()


def format_fingerprint(public: str) -> str:
    """A public key as people compare it on the telephone: SHA-256, in groups of four digits."""
    digits = sha256(bytes.fromhex(public)).hexdigest()[:32]
    return ":".join(digits[a:b] for a, b in pairwise(range(0, 33, 4)))


def agree(secret: bytes, public: str, info: bytes) -> bytes:
    """Derive 32 bytes that only the holders of these two keys share, for the purpose in info.

    secret: own private key. info: names run, round, purpose and pair. Raises ProtocolError when public is no
    usable key.
    """
    try:
        return derive(_exchange(secret, public), info)
    except ValueError as error:
        raise ProtocolError(f"public key {public:.16}: not usable: {error}") from error


def require_usable_key(public: str) -> None:
    """Raises ProtocolError for an agreement key with which nobody can agree, such as one of low order."""
    agree(draw_secret(), public, b"usable")


@lru_cache(maxsize=1 << 14)
def _exchange(secret: bytes, public: str) -> bytes:
    """The X25519 secret of two keys; the keys of a task serve all its attempts."""
    return _load_private(secret).exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))


@lru_cache(maxsize=256)
def _load_private(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)


def derive(secret: bytes, info: bytes) -> bytes:
    """Derive 32 bytes from a seed for the purpose in info."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def sign(secret: bytes, content: bytes) -> str:
    """Ed25519 signature (hex) of content by the private key `secret`."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(content).hex()


@lru_cache(maxsize=1 << 15)
def verify_signature(public: str, content: bytes, signature: str) -> bool:
    """Whether `signature` is by the holder of the signing key `public`, for this content."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), content)
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(secret: bytes, info: bytes, content: bytes, to: str) -> str:
    """Encrypt content for the holder of the public key `to`; the server can neither read nor change it.

    secret: the sender's private agreement key. info: names run, round, attempt, purpose and the ordered pair;
    also the associated data.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return (nonce + AESGCM(agree(secret, to, info)).encrypt(nonce, content, info)).hex()


def unseal(secret: bytes, info: bytes, sealed: str, sender: str) -> bytes:
    """Decrypt what the holder of the public key `sender` sealed for us. Raises ProtocolError if it is not.

    secret: the receiver's private agreement key. info: as in seal().
    """
    try:
        raw = bytes.fromhex(sealed)
        key = agree(secret, sender, info)
        return AESGCM(key).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], info)
    except (InvalidTag, ValueError) as error:
        raise ProtocolError("sealed shares: damaged, of another attempt, or not for this site") from error


PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share of the secret, 33 bytes, for each point.

    secret: 32 bytes. points: distinct positive integers, one for each holder of a share. threshold: shares
    that give the secret back, 1 to len(points). Raises ValueError when they are outside these ranges.
    """
    if len(secret) != SECRET_BYTES or len(set(points)) < len(points) or min(points, default=0) < 1:
        raise ValueError("a secret of 32 bytes and distinct positive points are needed")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold: found {threshold}, allowed 1 to {len(points)}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


@lru_cache(maxsize=64)
def _compute_weights_at_zero(points: tuple[int, ...]) -> list[int]:
    """Lagrange weights, with which sum_i weight_i share_i is the secret.

    The weights depend on the points alone, so they serve every secret that is shared among them.
    """
    weights = []
    for own in points:
        above, below = 1, 1
        for other in points:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of 32 bytes that these shares, by point, belong to; exactly the threshold of them suffices.

    Raises ProtocolError when the shares are no shares of one secret, as far as that shows.
    """
    value = 0
    for weight, share in zip(_compute_weights_at_zero(tuple(shares)), shares.values(), strict=True):
        element = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or element >= PRIME:
            raise ProtocolError(f"share: found {len(share)} bytes, allowed 33 that are one field element")
        value = (value + weight * element) % PRIME
    if value >= 2**256:
        raise ProtocolError("shares: they do not belong to one secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "big")


_CHUNK = 1 << 18
"""Bytes of a mask made at once: they and the piece that they are added to stay in the processor's cache."""
_BLOCK = 16
_NONCE = bytes(12)
Words = NDArray[np.uint64]
"""(N,) integers modulo 2^64."""


def add_masks(vector: Words, seeds: Iterable[bytes], *, subtract: bool = False) -> None:
    """Add (or subtract) the mask of each seed to vector, in place, modulo 2^64.

    All masks go over one piece of the vector before the next, so that memory is passed over once.
    vector: (N,), contiguous. seeds: 32 bytes each.
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
