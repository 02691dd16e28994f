"""The publisher's signature of an app: who staged it, beside the hash that says what was staged.

The operator's publisher key is Ed25519 and lies with the authority's key, which never enters a container. A
site has the public key from its first bundle, compared by telephone, and approves apps that are signed by it
alone. (Flower's own trusted entities only know apps that were signed through Flower's hub.)
"""

import base64
import binascii
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file

SUFFIX = ".sig"
"""A signature lies beside its app: NAME.fab.sig."""
_PURPOSE = b"perennial app, version 1\n"
"""Signed before the app's bytes, so that a signature of anything else is none of an app."""


def make_publisher_key(private: Path, public: Path) -> None:
    """Make a key pair in two files: private for its owner alone, public as an OpenSSH line.

    Raises StateError when there is one: sites that have the old public key would refuse what is signed.
    """
    if private.exists():
        raise StateError(f"{private}: exists already; move it away to make a new publisher key")
    key = Ed25519PrivateKey.generate()
    form = serialization.PrivateFormat.OpenSSH
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    encoding = serialization.Encoding.OpenSSH
    line = key.public_key().public_bytes(encoding, serialization.PublicFormat.OpenSSH) + b"\n"
    replace_file(private, secret, mode=0o600)
    replace_file(public, line, mode=0o644)


def read_private_key(private: Path) -> Ed25519PrivateKey:
    """The publisher's signing key. Raises StateError when it cannot be read."""
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateError(f"{private}: the key cannot be read: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{private}: found {type(key).__name__}, allowed an Ed25519 key")
    return key


def sign_app(fab: Path, private: Path) -> Path:
    """Sign an app; returns the path of the signature beside it. Raises StateError without a readable key."""
    key = read_private_key(private)
    signature = fab.with_name(fab.name + SUFFIX)
    replace_file(signature, base64.b64encode(key.sign(_PURPOSE + fab.read_bytes())) + b"\n", mode=0o644)
    return signature


def check_signature(fab: Path, public: Path, data: bytes | None = None) -> None:
    """Raises ConfigError unless NAME.fab.sig beside the app is the publisher's signature of exactly it.

    data: the app's bytes, where they were read already.
    """
    signature = fab.with_name(fab.name + SUFFIX)
    try:
        key = serialization.load_ssh_public_key(public.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{public}: missing, so nobody can say who made this app; open a newer bundle of the operator, "
            "and compare the key's fingerprint by telephone"
        ) from None
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{public}: not the publisher's key: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{public}: found {type(key).__name__}, allowed an Ed25519 key")
    try:
        signed = base64.b64decode(signature.read_bytes().strip(), validate=True)
        key.verify(signed, _PURPOSE + (fab.read_bytes() if data is None else data))
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except (InvalidSignature, binascii.Error, ValueError):
        raise ConfigError(
            f"{signature}: not a signature of {fab.name} by the publisher whose key is {public}; do not "
            "approve this app, and ask the operator"
        ) from None
