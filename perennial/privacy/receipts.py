"""The operator's receipts of a site's ledger: signed by the server, kept apart by the site.

A receipt says how far the ledger went when a reply left. The site keeps the newest one in a file outside its
state folder, and refuses to release anything while its ledger is shorter than that or does not hold that
line. The server keeps it too and sends it along with each request, so that a site notices when its whole
disk was put back from an older copy. A receipt is signed and names its site, so it binds no other site.

A receipt that a hospital set aside, because it began a new ledger, stays in the file as superseded.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.privacy.ledger_tip import Tip, TipPosition

_PURPOSE = b"perennial receipt of a ledger, version 1\n"
"""Signed before a receipt, so that a signature of anything else is none of a receipt."""
LARGEST = 1 << 20
"""Bytes of a site's file of receipts."""
_NUMBERS, _TEXTS = ("length", "lines", "newest"), ("site", "last", "signature")


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """How far a site's ledger went.

    length, lines: of the whole, in bytes and in number. newest: bytes of the newest line, whose SHA-256 is
    last (hex). signature: hex; '' before it is signed.
    """

    site: str
    length: int
    lines: int
    newest: int
    last: str
    signature: str = ""

    @property
    def tip(self) -> Tip:
        """The tip of the ledger that this receipt is about, with no totals."""
        return Tip(TipPosition(self.length, self.lines, self.last), {}, self.newest)

    def signed(self, key: Ed25519PrivateKey) -> Self:
        """This receipt with the operator's signature. key: the operator's."""
        return replace(self, signature=key.sign(self._signed_bytes()).hex())

    def holds(self, key: Ed25519PublicKey) -> bool:
        """Whether the signature is by the operator's key, for exactly this receipt."""
        try:
            key.verify(bytes.fromhex(self.signature), self._signed_bytes())
        except (InvalidSignature, ValueError):
            return False
        return True

    def _signed_bytes(self) -> bytes:
        fields = [self.site, self.length, self.lines, self.newest, self.last]
        return _PURPOSE + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The receipt with these fields. Raises ValueError when they are not a receipt's."""
        if not isinstance(values, dict) or values.keys() != {*_NUMBERS, *_TEXTS}:
            raise ValueError(f"found {values!r:.80}, allowed a receipt")
        if any(type(values[name]) is not int or values[name] < 0 for name in _NUMBERS):
            raise ValueError("a length that is no whole number from 0")
        if any(type(values[name]) is not str for name in _TEXTS):
            raise ValueError("a name, hash or signature that is no text")
        return cls(**values)


@dataclass(frozen=True)
class ReceiptBook:
    """A file of receipts: the newest one, and those that the hospital has set aside.

    At a site it lies apart from the ledger; at the server there is one for each site.
    """

    path: Path

    def newest(self) -> Receipt | None:
        """The newest receipt; None without a file. Raises StateError when the file is damaged."""
        return self._read()[0]

    def keep(self, receipt: Receipt) -> None:
        """Store the newest receipt durably, unless the hospital has set it aside.

        Raises StateError naming the file when it cannot be written.
        """
        newest, aside = self._read()
        if receipt != newest and receipt.last not in aside:
            self._write(receipt, aside)

    @property
    def aside(self) -> list[str]:
        """Hashes of the last ledger lines of those receipts that the hospital has set aside."""
        return self._read()[1]

    def set_aside(self) -> None:
        """Set the newest receipt aside, because the hospital begins a new ledger; it binds no more."""
        newest, aside = self._read()
        if newest is not None:
            self._write(None, [*aside, newest.last])

    def _read(self) -> tuple[Receipt | None, list[str]]:
        try:
            with self.path.open("rb") as file:
                data = file.read(LARGEST + 1)
            if len(data) > LARGEST:
                raise ValueError(f"more than {LARGEST} bytes")
            values = json.loads(data)
            newest, aside = values["newest"], values["aside"]
            if not isinstance(aside, list) or not all(isinstance(last, str) for last in aside):
                raise ValueError("aside: no list of hashes")
            return (None if newest is None else Receipt.from_json(newest)), aside
        except FileNotFoundError:
            return None, []
        except OSError as error:
            raise StateError(f"{self.path}: the receipts cannot be read ({error.strerror})") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StateError(
                f"{self.path}: not a file of receipts, or damaged ({error!r:.200}); remove it if the ledger "
                "is the newest one, and the operator's next request brings the newest receipt"
            ) from error

    def _write(self, newest: Receipt | None, aside: list[str]) -> None:
        values = {"newest": None if newest is None else asdict(newest), "aside": aside}
        make_folder(self.path.parent)
        replace_file(self.path, json.dumps(values).encode())


def read_receipt_key(path: Path) -> Ed25519PublicKey:
    """The operator's public key for receipts. Raises StateError naming the file when it is none."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise StateError(f"{path}: not the operator's key for receipts: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise StateError(f"{path}: found {type(key).__name__}, allowed an Ed25519 key")
    return key
