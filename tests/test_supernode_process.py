"""A SuperNode sends whole replies, and outlives a ClientApp that was killed while it handed one over."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode import start_client_internal

from perennial.deploy import supernode_process
from perennial.deploy.supernode_process import send_whole_replies

PARTS = [b"first part", b"second part"]


class State:
    """One reply that waits to be sent."""

    def __init__(self, message_id: str) -> None:
        metadata = SimpleNamespace(
            message_id=message_id,
            reply_to_message_id="asked",
            run_id=1,
            group_id="",
            message_type="train",
        )
        self.reply, self.deleted = SimpleNamespace(metadata=metadata), False

    def get_messages(self, is_reply: bool) -> list[Any]:
        assert is_reply
        return [self.reply]

    def get_message_processing_duration(self, message_id: str) -> float:
        assert message_id == "asked"
        return 1.0

    def delete_messages(self, message_ids: list[str]) -> None:
        self.deleted = True


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> tuple[InMemoryObjectStore, ObjectTree]:
    """A store that expects a reply of two parts and has its root alone."""
    monkeypatch.setattr(start_client_internal, "_push_messages", start_client_internal._push_messages)
    send_whole_replies()
    store = InMemoryObjectStore(verify=False)
    root, *parts = (get_object_id(part) for part in [b"root", *PARTS])
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=part) for part in parts])
    store.preregister(1, tree)
    store.put(root, b"root")
    return store, tree


def push(store: InMemoryObjectStore, tree: ObjectTree, sent: list[str]) -> State:
    """One turn of the SuperNode; what reaches the SuperLink is appended to sent."""
    state = State(tree.object_id)

    def send(message: Any, tree: ObjectTree, runtime: float) -> tuple[set[str], str]:
        sent.append("message")
        return {tree.object_id, *(child.object_id for child in tree.children)}, "session"

    def push_object(run: int, session: str, name: str, content: bytes) -> None:
        sent.append(content.decode())

    start_client_internal._push_messages(
        state=state,  # pyright: ignore[reportArgumentType]
        object_store=store,
        send=send,
        push_object=push_object,
    )
    return state


def test_nothing_of_a_reply_is_sent_before_all_of_it_is_there(
    handed_over: tuple[InMemoryObjectStore, ObjectTree],
) -> None:
    store, tree = handed_over
    sent: list[str] = []
    turn = threading.Thread(target=push, args=(store, tree, sent))
    turn.start()
    for part in PARTS:
        time.sleep(0.2)
        assert sent == []
        store.put(get_object_id(part), part)
    turn.join(timeout=20)
    assert sent[0] == "message" and sorted(sent[1:]) == ["first part", "root", "second part"]


def test_a_reply_whose_author_is_dead_is_given_up(
    handed_over: tuple[InMemoryObjectStore, ObjectTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tree = handed_over
    store.put(get_object_id(PARTS[0]), PARTS[0])
    monkeypatch.setattr(supernode_process, "PATIENCE", 0.2)
    sent: list[str] = []
    state = push(store, tree, sent)
    assert sent == [] and state.deleted
    assert tree.object_id not in store
