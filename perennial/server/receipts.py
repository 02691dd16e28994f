"""The operator's receipts: the server signs the tip of each site's ledger, and sends the newest one along.

It works between the strategies and Flower's grid, so that no strategy knows of it.
"""

from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message
from flwr.serverapp import Grid

from perennial.foundation.errors import ProtocolError, StateError
from perennial.foundation.names import is_site_name
from perennial.foundation.registered import RECEIPTS_KEY, registered_names
from perennial.privacy.receipts import Receipt, ReceiptBook
from perennial.protocol.receipts import LedgerReceipt, LedgerTip
from perennial.server.faults import WENT_BACK, WENT_ON
from perennial.server.forwarding_grid import ForwardingGrid

FOLDER = "receipts"
"""In the operator's state folder, beside the key: the newest receipt of each site."""


class ReceiptGrid(ForwardingGrid):
    """A grid that sends each site its newest receipt, and signs the ledger tips that come with replies.

    state: the operator's folder of the key and the receipts. record: the operator's file of nodes and names;
    None: a node's own name is believed. note: called about ledgers that went back, and about invalid tips.
    """

    def __init__(self, grid: Grid, state: Path, record: Path | None, note: Callable[[str], None]) -> None:
        super().__init__(grid)
        self._record, self._note = record, note
        self._folder, self._key = state / FOLDER, read_operator_key(state / RECEIPTS_KEY)
        self._names: dict[int, str] = {}
        self._back: set[str] = set()

    def _sent(self, message: Message) -> Message:
        name = self._name(message.metadata.dst_node_id)
        newest = None if name is None else self._book(name).newest()
        if newest is not None:
            message.content = LedgerReceipt(**vars(newest)).beside_copy(message.content)
        return message

    def _received(self, reply: Message) -> Message:
        """Sign and keep the tip beside a reply. What is none is noted, and the reply counts all the same."""
        if reply.has_error():
            return reply
        node = reply.metadata.src_node_id
        try:
            tip = LedgerTip.beside(reply.content)
            if tip is None:
                return reply
            name = self._name(node, tip.site)
            if name != tip.site:
                raise ProtocolError(f"ledger: found the tip of site {tip.site!r}, the node is {name!r}")
        except ProtocolError as error:
            self._note(f"node {node}: no receipt: {error}")
            return reply
        book = self._book(tip.site)
        before = book.newest()
        receipt = Receipt(**{name: value for name, value in vars(tip).items() if name != "aside"})
        forward = before is None or before.last in tip.aside or receipt.lines > before.lines
        if forward:
            book.keep(receipt.signed(self._key))
            if tip.site in self._back:
                self._back.remove(tip.site)
                self._note(f"site {tip.site}: {WENT_ON} at line {receipt.lines}")
        elif before is not None and before.last != receipt.last and tip.site not in self._back:
            self._back.add(tip.site)
            self._note(
                f"site {tip.site}: {WENT_BACK} from line {before.lines} to line {receipt.lines}, and the "
                "hospital did not begin a new one; ask it whether its ledger was lost or put back"
            )
        return reply

    def _name(self, node: int, said: str | None = None) -> str | None:
        """The operator's name of a node, or the one that it said where there is no record."""
        if self._record is not None:
            name = registered_names(self._record).get(str(node))
            return name if name is not None and is_site_name(name) else None
        if said is not None:
            self._names[node] = said
        return self._names.get(node)

    def _book(self, name: str) -> ReceiptBook:
        assert is_site_name(name)
        return ReceiptBook(self._folder / f"{name}.json")


def read_operator_key(path: Path) -> Ed25519PrivateKey:
    """Read the key for receipts and certificates. Raises StateError naming the file if it holds none."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"{path}: the key for receipts cannot be read: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path}: found {type(key).__name__}, allowed an Ed25519 key")
    return key
