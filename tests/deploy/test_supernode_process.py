"""A SuperNode sends whole replies, and outlives a ClientApp that was killed while it handed one over."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from perennial.config.approval import Approval
from perennial.deploy import supernode_process
from perennial.deploy.supernode_process import expire_token, refuse_unapproved_apps, send_whole_replies
from perennial.engine.grid import set_task_identity
from perennial.foundation.errors import NOT_APPROVED
from perennial.strategies.round.exchange import describe_error

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

    def get_tasks(self, statuses: list[str]) -> list[str]:
        return ["the ClientApp"]


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


def clientapp_at_work() -> tuple[InMemoryNodeState, InMemoryObjectStore, str]:
    """A ClientApp that runs, and for which a message waits; its token."""
    set_task_identity()
    store = InMemoryObjectStore(verify=False)
    state = InMemoryNodeState(store)
    state.set_node_id(7)
    task = state.create_task(task_type="flwr-clientapp", run_id=1)
    assert task is not None
    token = state.claim_task(task)
    assert token is not None and state.activate_task(task)
    message = Message(RecordDict(), 7, "train")
    message.metadata.__dict__["_run_id"] = 1
    start_client_internal._insert_message(message, state, store)
    return state, store, token


def handing_over() -> tuple[InMemoryNodeState, InMemoryObjectStore, str]:
    """A ClientApp that has announced its reply and handed nothing of it over; its token."""
    state, store, token = clientapp_at_work()
    (fetched,) = state.get_messages(run_ids=[1], is_reply=False)
    reply = Message(RecordDict(), reply_to=fetched)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    state.store_message(reply)
    store.preregister(1, get_object_tree(reply))
    return state, store, token


@pytest.mark.parametrize("how", ["killed", "ended without it", "silent"])
def test_an_error_is_sent_in_place_of_a_reply_whose_author_is_dead(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_client_internal, "_push_messages", start_client_internal._push_messages)
    send_whole_replies()
    state, store, token = handing_over()
    sent: list[Message] = []
    pushed: list[str] = []

    def send(message: Message, tree: ObjectTree, runtime: float) -> tuple[set[str], str]:
        sent.append(message)
        return {tree.object_id}, "session"

    def push_object(run: int, session: str, name: str, content: bytes) -> None:
        pushed.append(name)

    if how == "silent":
        monkeypatch.setattr(supernode_process, "PATIENCE", 0.2)
    turn = threading.Thread(
        target=start_client_internal._push_messages, args=(state, store, send, push_object)
    )
    turn.start()
    if how != "silent":
        time.sleep(0.3)
        assert not sent and turn.is_alive()
    if how == "killed":
        expire_token(state, token)
    elif how == "ended without it":
        task = state.get_task_by_token(token)
        assert task is not None and state.finish_task(task.task_id, "failed", "")
    turn.join(timeout=10)
    (error,) = sent
    assert error.has_error() and "stopped responding" in (error.error.reason or "")
    assert error.metadata.run_id == 1 and error.metadata.reply_to_message_id
    assert pushed == [error.metadata.message_id]
    assert not state.msg_store


def test_an_app_that_was_not_approved_is_one_sentence_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digest, runs = "ab" * 32, iter((7, 7, 8))
    inserted: list[Message] = []
    fetched: list[str] = []

    def flowers(*, receive: Any, get_fab: Any, **more: Any) -> int:
        message, _ = receive()
        get_fab(digest, message.metadata.run_id)
        return message.metadata.run_id

    def receive() -> tuple[Message, None]:
        set_task_identity()
        message = Message(RecordDict(), 1, "query")
        message.metadata.__dict__["_run_id"] = next(runs)
        return message, None

    def get_fab(found: str, run: int) -> str:
        fetched.append(found)
        return "fab"

    (tmp_path / "site.yaml").write_text("site: graz\nstate_dir: state\n")
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", flowers)
    monkeypatch.setattr(start_client_internal, "_insert_message", lambda reply, *more: inserted.append(reply))
    refuse_unapproved_apps(tmp_path / "site.yaml")

    def pull() -> Any:
        return start_client_internal._pull_and_store_message(
            state=None,  # pyright: ignore[reportArgumentType]
            object_store=None,  # pyright: ignore[reportArgumentType]
            receive=receive,  # pyright: ignore[reportArgumentType]
            get_fab=get_fab,  # pyright: ignore[reportArgumentType]
        )  # pyright: ignore[reportCallIssue]

    with caplog.at_level("WARNING", logger="perennial.site"):
        assert pull() == 7 and pull() == 7
    assert [describe_error(reply.error.reason or "") for reply in inserted] == [NOT_APPROVED] * 2
    assert fetched == [] and len(caplog.records) == 1 and digest in caplog.text
    approval = Approval(app="a", bundle=digest, experiment="e", document="name: skin", time="t")
    (tmp_path / "approvals").mkdir()
    (tmp_path / "approvals" / approval.name).write_text(approval.model_dump_json())
    assert pull() == 8 and fetched == [digest] and len(inserted) == 2


@pytest.mark.parametrize("fetched", [True, False], ids=["has fetched its message", "has not yet"])
def test_a_killed_clientapp_is_answered_for_at_once(fetched: bool) -> None:
    state, _, token = clientapp_at_work()
    if fetched:
        assert state.get_messages(run_ids=[1], is_reply=False)
    expire_token(state, "another")
    assert state.get_task_by_token(token) is not None and not state.get_messages(is_reply=True)
    expire_token(state, token)
    (reply,) = state.get_messages(is_reply=True)
    assert reply.has_error() and state.get_task_by_token(token) is None
