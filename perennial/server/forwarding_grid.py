"""The base of grids that stand between the strategies and Flower's, each for one purpose."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid


class ForwardingGrid(Grid):
    """Passes everything to another grid; a subclass changes what is sent, or what comes back."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def _sent(self, message: Message) -> Message:
        """A message as the other grid gets it."""
        return message

    def _received(self, reply: Message) -> Message:
        """A reply of the other grid as it is given back."""
        return reply

    # Flower's grid

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        return self._grid.create_message(*arguments, **named)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages([self._sent(message) for message in messages])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._received(reply) for reply in self._grid.pull_messages(message_ids)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = [self._sent(message) for message in messages]
        return [self._received(reply) for reply in self._grid.send_and_receive(sent, timeout=timeout)]
