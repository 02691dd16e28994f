"""What travels beside a message so that the operator can witness a site's ledger.

A site that keeps receipts puts the tip of its ledger beside each reply; the server signs it, and puts the
newest receipt beside its next request. Both are records of their own, so that messages stay as they are.
"""

from dataclasses import dataclass
from typing import Self, TypeVar

from flwr.app import ConfigRecord, RecordDict

from perennial.foundation.errors import ProtocolError
from perennial.foundation.names import is_site_name
from perennial.protocol.fields import (
    BESIDE_REPLY,
    BESIDE_REQUEST,
    WireMessage,
    bounded,
    hexadecimal,
    matching,
)

MOST = 2**62
Message = TypeVar("Message", bound=WireMessage)


@dataclass(frozen=True, kw_only=True)
class OfLedger(WireMessage):
    """How far a site's ledger went."""

    site: str = matching(is_site_name, "a site's name")
    """Whose ledger it is: the name in site.yaml."""
    length: int = bounded(0, MOST)
    """Bytes of the ledger."""
    lines: int = bounded(0, MOST)
    """Its number of lines."""
    newest: int = bounded(0, MOST)
    """Bytes of the newest line."""
    last: str = hexadecimal(64)
    """SHA-256 of the newest line, which chains all lines before it."""


@dataclass(frozen=True, kw_only=True)
class LedgerTip(OfLedger):
    """Beside any reply of a site that keeps receipts: how far its ledger went. No release is named.

    The number of lines says how many releases the site has charged in its life, for all its operators.
    """

    message_type = "query.ledger_tip"
    aside: list[str] = hexadecimal(64)
    """Hashes of receipts that the hospital set aside when it began a new ledger."""

    @classmethod
    def beside(cls, reply: RecordDict) -> Self | None:
        """The tip beside a reply; None without one. Raises ProtocolError when it is none."""
        return _read(cls, reply, BESIDE_REPLY)

    def put_beside(self, reply: RecordDict) -> None:
        """Add this tip to a reply."""
        reply[BESIDE_REPLY] = self.to_record()["fields"]


@dataclass(frozen=True, kw_only=True)
class LedgerReceipt(OfLedger):
    """Beside any request to a site that has sent a tip: the newest one that this operator saw, signed."""

    message_type = "query.ledger_receipt"
    signature: str = hexadecimal(128)
    """Signature by the operator's receipt key (Ed25519) over all fields above."""

    @classmethod
    def beside(cls, request: RecordDict) -> Self | None:
        """The receipt beside a request; None without one. Raises ProtocolError when it is none."""
        return _read(cls, request, BESIDE_REQUEST)

    def beside_copy(self, request: RecordDict) -> RecordDict:
        """The request with this receipt. The request itself, which other sites get too, stays as it is."""
        whole = RecordDict({**request})
        whole[BESIDE_REQUEST] = self.to_record()["fields"]
        return whole


def _read(cls: type[Message], record: RecordDict, name: str) -> Message | None:
    fields = record.get(name)
    if fields is None:
        return None
    if not isinstance(fields, ConfigRecord):
        raise ProtocolError(f"{name}: found {type(fields).__name__}, allowed a ConfigRecord")
    return cls.from_record(RecordDict({"fields": fields}))
