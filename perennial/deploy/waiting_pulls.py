"""A SuperNode that asks for a message waits at the SuperLink until there is one, in place of asking again.

Flower 1.39 answers at once, its SuperNode then sleeps for 3 s, and each question costs the SuperLink a
signature and several looks into its database. A message that comes meanwhile was accepted for a node that was
not revoked, so it is the answer.
"""

import threading
from typing import Any

from perennial.deploy.flower_seam import fleet_message_handler

WAIT = 5.0
"""Most seconds that a question waits."""
MOST = 500
"""Questions that wait at once; Flower has 1,000 threads, and further ones are answered as they come."""


class Arrivals:
    """Events for nodes whose requests for messages wait at the SuperLink."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._come: dict[int, threading.Event] = {}
        self._places = threading.BoundedSemaphore(MOST)

    def expect(self, node: int) -> threading.Event:
        """An event that is set when note() is next called for this node."""
        with self._lock:
            come = self._come[node] = threading.Event()
        return come

    def note(self, node: int) -> None:
        """Set the node's event: a message has come for it."""
        with self._lock:
            come = self._come.get(node)
        if come is not None:
            come.set()

    def wait(self, come: threading.Event) -> bool:
        """Wait up to WAIT seconds for an event; returns whether it is set, at once if MOST others wait."""
        if self._places.acquire(blocking=False):
            try:
                come.wait(WAIT)
            finally:
                self._places.release()
        return come.is_set()


def let_pulls_wait(link_state: type) -> None:
    """Let the SuperLink of this process answer a node's request for messages only once there is one.

    link_state: the class of its state, Flower's LinkState. After WAIT seconds it answers without one.
    """
    arrivals = Arrivals()
    pull, store = fleet_message_handler.pull_messages, vars(link_state)["store_message_and_object_tree"]

    def pull_or_wait(request: Any, **more: Any) -> Any:
        # before the look, so that none is missed that comes after it
        come = arrivals.expect(request.node.node_id)
        response = pull(request=request, **more)
        return (
            response if response.messages_list or not arrivals.wait(come) else pull(request=request, **more)
        )

    def store_and_note(self: Any, message: Any, *rest: Any, **more: Any) -> Any:
        stored = store(self, message, *rest, **more)
        arrivals.note(message.metadata.dst_node_id)
        return stored

    vars(fleet_message_handler).update(pull_messages=pull_or_wait)
    setattr(link_state, "store_message_and_object_tree", store_and_note)  # noqa: B010
