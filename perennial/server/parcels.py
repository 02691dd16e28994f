"""Messages to and from real sites travel as parcels: one object each, where Flower would carry dozens."""

from contextlib import suppress

from flwr.app import Message

from perennial.foundation.errors import ProtocolError
from perennial.protocol.parcel import is_parcel, opened, parcelled
from perennial.server.forwarding_grid import ForwardingGrid


class ParcelGrid(ForwardingGrid):
    """A grid that sends parcels and opens those that come back; it stands next to Flower's own.

    A site answers with a parcel when it was asked with one. A parcel that cannot be opened goes on as it is,
    so that the reply is dropped, by name, like any other that is no message of ours.
    """

    def _sent(self, message: Message) -> Message:
        # the tensors' bytes are shared, not copied
        message.content = parcelled(message.content)
        return message

    def _received(self, reply: Message) -> Message:
        if reply.has_content() and is_parcel(reply.content):
            with suppress(ProtocolError):
                reply.content = opened(reply.content)
        return reply
