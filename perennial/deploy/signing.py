"""Ed25519 key pairs of a federation, such as the one with which the server signs receipts."""

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file


def make_signing_key(private: Path, public: Path) -> None:
    """Make a key pair in two files: private for its owner alone, public as an OpenSSH line.

    Raises StateError when there is one: whoever has the old public key would refuse what is signed.
    """
    if private.exists():
        raise StateError(f"{private}: exists already; move it away to make a new key")
    key = Ed25519PrivateKey.generate()
    form = serialization.PrivateFormat.OpenSSH
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    encoding = serialization.Encoding.OpenSSH
    line = key.public_key().public_bytes(encoding, serialization.PublicFormat.OpenSSH) + b"\n"
    replace_file(private, secret, mode=0o600)
    replace_file(public, line, mode=0o644)


def read_private_key(private: Path) -> Ed25519PrivateKey:
    """A signing key. Raises StateError when it cannot be read."""
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateError(f"{private}: the key cannot be read: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{private}: found {type(key).__name__}, allowed an Ed25519 key")
    return key
