"""Flower's SuperNode as its own process, which sends a reply only when it has all of it.

Flower 1.39 tells the SuperLink of a reply as soon as the ClientApp begins to hand it over. Where the
ClientApp is killed before the last part, the SuperNode waits for that part for ever and answers nothing more,
and the server's own exchange stands still for minutes. Here the SuperNode waits first, gives up after a
while, and goes on with the next request; the server sees a site that did not answer.
"""

import time
from collections.abc import Callable
from typing import Any

from perennial.deploy.child_watch import end_with_child
from perennial.deploy.flower_seam import (
    ObjectStore,
    flower_supernode,
    iterate_object_tree,
    start_client_internal,
)

PATIENCE = 60.0
"""Seconds without the next part of a reply, which comes from a process on the same machine."""
POLL = 0.05

Send = Callable[[Any, Any, float], Any]


def wait_until_complete(store: ObjectStore, tree: Any) -> None:
    """Return once the store has every object of tree. Raises TimeoutError after PATIENCE without the next."""
    for node in iterate_object_tree(tree):
        until = time.monotonic() + PATIENCE
        while store.get(node.object_id) == b"":
            if time.monotonic() > until:
                raise TimeoutError("the ClientApp ended before it had handed over the whole reply")
            time.sleep(POLL)


def send_whole_replies() -> None:
    """Let the SuperNode of this process send whole replies only."""
    push_messages = start_client_internal._push_messages

    def push_whole_messages(state: Any, object_store: ObjectStore, send: Send, push_object: Any) -> None:
        def send_when_complete(message: Any, tree: Any, runtime: float) -> Any:
            wait_until_complete(object_store, tree)
            return send(message, tree, runtime)

        push_messages(state, object_store, send_when_complete, push_object)

    start_client_internal._push_messages = push_whole_messages


if __name__ == "__main__":
    send_whole_replies()
    end_with_child(start_client_internal, "flower-superexec")
    flower_supernode()
