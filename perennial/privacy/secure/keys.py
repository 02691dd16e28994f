"""Keys, seeds and signatures, from the primitives of `cryptography` alone.

X25519 agrees on a secret, HKDF-SHA256 makes a key of it for one purpose, AES-256-GCM seals what travels
between two sites, Ed25519 signs. Keys travel as hexadecimal digits.
"""

import os
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from perennial.foundation.errors import ProtocolError

KEY_BYTES = 32
_NONCE_BYTES = 12


def joined(*parts: str | int | bytes) -> bytes:
    """The parts, each after its length, so that different lists never give the same bytes."""
    pieces = []
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        pieces += [len(content).to_bytes(8, "big"), content]
    return b"".join(pieces)


def new_secret() -> bytes:
    """32 bytes from the operating system's secure source: a private key or a seed."""
    return os.urandom(KEY_BYTES)


def agreement_key(secret: bytes) -> str:
    """The public X25519 key of a private one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()


def signing_key(secret: bytes) -> str:
    """The public Ed25519 key of a private one: a site's identity."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()


def fingerprint(public: str) -> str:
    """A public key as people compare it on the telephone: SHA-256, in groups of four digits."""
    digits = sha256(bytes.fromhex(public)).hexdigest()[:32]
    return ":".join(digits[a:b] for a, b in pairwise(range(0, 33, 4)))


def agree(secret: bytes, public: str, info: bytes) -> bytes:
    """Derive 32 bytes that only the holders of these two keys share, for the purpose in info.

    secret: own private key. info: names run, round, purpose and pair. Raises ProtocolError when public is no
    usable key.
    """
    try:
        return derive(_exchanged(secret, public), info)
    except ValueError as error:
        raise ProtocolError(f"public key {public:.16}: not usable: {error}") from error


@lru_cache(maxsize=1 << 14)
def _exchanged(secret: bytes, public: str) -> bytes:
    """The X25519 secret of two keys; the keys of a task serve all its attempts."""
    return _private(secret).exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))


@lru_cache(maxsize=256)
def _private(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)


def derive(secret: bytes, info: bytes) -> bytes:
    """Derive 32 bytes from a seed for the purpose in info."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def sign(secret: bytes, content: bytes) -> str:
    """Ed25519 signature (hex) of content by the private key `secret`."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(content).hex()


@lru_cache(maxsize=1 << 15)
def verified(public: str, content: bytes, signature: str) -> bool:
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


def unsealed(secret: bytes, info: bytes, sealed: str, sender: str) -> bytes:
    """Decrypt what the holder of the public key `sender` sealed for us. Raises ProtocolError if it is not.

    secret: the receiver's private agreement key. info: as in seal().
    """
    try:
        raw = bytes.fromhex(sealed)
        key = agree(secret, sender, info)
        return AESGCM(key).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], info)
    except (InvalidTag, ValueError) as error:
        raise ProtocolError("sealed shares: damaged, of another attempt, or not for this site") from error
