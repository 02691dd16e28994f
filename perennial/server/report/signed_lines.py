"""Signed verdicts of the gate: sentences shown beside an evaluation and in the model card.

A signature says who holds the key, and nothing of who that is: its fingerprint is compared by telephone.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file

FILE = "gate.jsonl"
"""In the folder of an evaluation; a line for each verdict, and none is ever taken out."""
HEADING = "## Judged against an approved model"
_PURPOSE = b"perennial verdict of the gate, version 1\n"


def add_signed(folder: Path, text: str, key: Ed25519PrivateKey) -> None:
    """Sign a sentence and append it to the verdicts in an evaluation's folder."""
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    line = {
        "text": text,
        "key": key.public_key().public_bytes(encoding, form).decode(),
        "signature": base64.b64encode(key.sign(_PURPOSE + text.encode())).decode(),
    }
    path = folder / FILE
    before = path.read_bytes() if path.exists() else b""
    replace_file(path, before + json.dumps(line).encode() + b"\n", mode=0o644)


def signed_section(run: Path) -> str:
    """Every verdict in a run's folder, in Markdown; '' without one. Raises StateError on a damaged file."""
    lines = [line for path in sorted(run.glob(f"evaluations/*/{FILE}")) for line in _read(path)]
    return f"{HEADING}\n\n" + "\n".join(lines) if lines else ""


def _read(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            content = json.loads(line)
            text, key, signature = (str(content[name]) for name in ("text", "key", "signature"))
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{path}, line {number}: damaged; expected a signed verdict") from error
        held = holds(text, key, signature)
        shown = text if held else f"NOT what was signed: {text}"
        yield "- " + re.sub(r"([<>`*_|])", r"\\\1", shown) + f" Signed: `{key}` `{signature}`"


def holds(text: str, key: str, signature: str) -> bool:
    """Whether a signature, in base64, is that of an OpenSSH Ed25519 key on exactly this sentence."""
    try:
        public = serialization.load_ssh_public_key(key.encode())
        if not isinstance(public, Ed25519PublicKey):
            return False
        public.verify(base64.b64decode(signature), _PURPOSE + text.encode())
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def into_card(run: Path, card: Path) -> None:
    """Put a run's verdicts into its card, in place of older ones; make a card of them if there is none."""
    text = card.read_text(encoding="utf-8") if card.exists() else "# Model card\n"
    others = re.sub(rf"(?ms)^{HEADING}\n.*?(?=^## |\Z)", "", text).rstrip()
    title, _, rest = others.partition("\n")
    parts = [title, signed_section(run), rest.strip()]
    replace_file(card, ("\n\n".join(filter(None, parts)) + "\n").encode(), mode=0o644)


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
