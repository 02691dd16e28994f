"""Node keys: the ECDSA P-384 pair with which a SuperNode proves to the SuperLink which site it is."""

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file


def make_node_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def write_node_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Make a node's key pair and write it to two files.

    path: the private key in OpenSSH form, for its owner alone; path.pub: the public one.
    Raises StateError when path exists: a key that a SuperLink knows is not overwritten by accident.
    """
    if path.exists():
        raise StateError(f"{path}: exists already; move it away to make a new key (and register that one)")
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, private, mode=0o600)
    replace_file(path.with_name(f"{path.name}.pub"), public_line(key), mode=0o644)


def public_line(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key as one OpenSSH line."""
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(encoding, form) + b"\n"


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key. Raises StateError for a file that is missing, no such key, or open to others."""
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise StateError(
            f"{path}: mode {mode & 0o777:o} lets others read the private key; allowed 600 (chmod 600 {path})"
        )
    try:
        return _node_key(serialization.load_ssh_private_key(data, None), str(path))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateError(f"{path}: not an unencrypted OpenSSH private key: {error}") from error


def check_public_line(line: bytes, where: str) -> bytes:
    """A site's public key, as one line. Raises ConfigError when it is not an ECDSA P-384 public key."""
    try:
        key = serialization.load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{where}: not an OpenSSH public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(f"{where}: found {type(key).__name__}, allowed an ECDSA P-384 key")
    return line.strip() + b"\n"


def fingerprint(public: bytes) -> str:
    """SHA-256 of a public key, in groups of four, for two people to compare on the telephone."""
    digest = hashlib.sha256(b" ".join(public.split()[:2])).hexdigest()[:32]
    return " ".join(digest[i : i + 4] for i in range(0, 32, 4))


def _node_key(key: object, where: str) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(f"{where}: found {type(key).__name__}, allowed an ECDSA P-384 key")
    return key
