"""Messages to and from real sites travel as parcels: one object each, where Flower would carry dozens."""

from collections.abc import Iterable

from flwr.app import Message

from perennial.foundation.errors import ProtocolError
from perennial.protocol.parcel import is_parcel, opened, parcelled
from perennial.server.forwarding_grid import ForwardingGrid


class ParcelGrid(ForwardingGrid):
    """A grid that sends parcels and opens those that come back; it stands next to Flower's own.

    A site answers with a parcel when it was asked with one. A parcel that cannot be opened goes on as it is,
    so that the reply is dropped, by name, like any other that is no message of ours.
    """

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(_with_parcels(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [_opened(reply) for reply in self._grid.pull_messages(message_ids)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = _with_parcels(messages)
        return [_opened(reply) for reply in self._grid.send_and_receive(sent, timeout=timeout)]


def _with_parcels(messages: Iterable[Message]) -> list[Message]:
    sent = list(messages)
    for message in sent:
        # the tensors' bytes are shared, not copied
        message.content = parcelled(message.content)
    return sent


def _opened(reply: Message) -> Message:
    if reply.has_content() and is_parcel(reply.content):
        try:
            reply.content = opened(reply.content)
        except ProtocolError:
            return reply
    return reply
