"""A site's side of the operator's receipts: keep the newest of a request, and attach the ledger's tip."""

from flwr.app import RecordDict

from perennial.client.identity import Identity
from perennial.foundation.errors import ProtocolError
from perennial.protocol.receipts import LedgerReceipt, LedgerTip


def take_receipt(identity: Identity, request: RecordDict) -> None:
    """Keep the receipt beside a request, where this site keeps receipts; it binds the ledger from then on.

    Raises ProtocolError when it is another site's or not the operator's, StateError when it cannot be kept.
    """
    settings = identity.receipts
    if settings is None or (found := LedgerReceipt.beside(request)) is None:
        return
    from perennial.privacy.receipts import Receipt, ReceiptBook, read_receipt_key

    receipt = Receipt(**vars(found))
    if receipt.site != identity.name:
        raise ProtocolError(f"receipt: found one of site {receipt.site!r}, this is {identity.name!r}")
    if not receipt.holds(read_receipt_key(settings.key)):
        raise ProtocolError("receipt: its signature is not that of the operator's key for receipts")
    book = ReceiptBook(settings.file)
    newest = book.newest()
    if newest is None or receipt.lines >= newest.lines:
        book.keep(receipt)


def attach_tip(identity: Identity, reply: RecordDict) -> None:
    """Put the tip of the ledger beside a reply, where this site keeps receipts and has charged anything."""
    if identity.receipts is None:
        return
    mark = identity.ledger.mark()
    if mark is not None:
        from perennial.privacy.receipts import ReceiptBook

        place, newest = mark
        LedgerTip(
            site=identity.name,
            length=place.bytes,
            lines=place.lines,
            newest=newest,
            last=place.last,
            aside=ReceiptBook(identity.receipts.file).aside,
        ).put_beside(reply)
