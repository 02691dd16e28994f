"""Flower's SuperNode as its own process, which sends a reply only when it has all of it.

Flower 1.39 tells the SuperLink of a reply as soon as the ClientApp begins to hand it over. Where the
ClientApp is killed before the last part, the SuperNode waits for that part for ever and answers nothing more,
and the server's own exchange stands still for minutes. Here the SuperNode waits first, gives up when the
ClientApp has ended, tells the server so, and goes on with the next request.
"""

import copy
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Error, Message

from perennial.client.activity import note_unapproved
from perennial.config.approval import read_approvals
from perennial.config.site import load_site_config
from perennial.deploy.child_watch import end_with_child
from perennial.deploy.flower_seam import (
    CLIENT_APP_CRASHED_ERROR,
    ErrorCode,
    ObjectStore,
    Status,
    flower_supernode,
    give_own,
    iterate_object_tree,
    make_message,
    plain_logs,
    start_client_internal,
    supernode_heartbeat,
)
from perennial.deploy.fork_server import FIRST_WAIT
from perennial.deploy.predecessor import note_node, place
from perennial.deploy.superexec_process import KILLED, WAKE
from perennial.deploy.supernode import ALIVE, ANSWERED
from perennial.foundation.errors import NOT_APPROVED
from perennial.foundation.files import sole_owner
from perennial.foundation.heartbeat import beating, renew
from perennial.foundation.site_log import log

SAID_AGAIN = 3600.0
"""Seconds until the log says again that an app is not approved."""
NOTED_EVERY = 1.0
"""Least seconds between two notes that the SuperLink has answered."""
PATIENCE = 60.0
"""Seconds without the next part of a reply, which comes from a process on the same machine."""
POLL = 0.05
SHORTEST_SLEEP = 0.02
"""Seconds between two looks for a message or a reply, just after the latest."""
HEARTBEAT = 15
"""Seconds: Flower beats every 7 to 9 then. The SuperLink takes a node for gone after a minute, as before."""
WAITED = 1.0
"""Seconds after which the answer to a question for messages says that it waited."""

Send = Callable[[Any, Any, float], Any]


def wait_until_complete(store: ObjectStore, tree: Any, goes_on: Callable[[], bool]) -> None:
    """Return once the store has every object of tree.

    goes_on: whether somebody still hands objects over. Raises TimeoutError when nobody does and one is
    missing, or after PATIENCE without the next.
    """
    for node in iterate_object_tree(tree):
        until = time.monotonic() + PATIENCE
        while True:
            # before the look, since a ClientApp ends after the last object
            more = goes_on() and time.monotonic() < until
            if store.get(node.object_id) != b"":
                break
            if not more:
                raise TimeoutError("the ClientApp ended before it had handed over the whole reply")
            time.sleep(POLL)


def send_whole_replies() -> None:
    """Let the SuperNode of this process send whole replies only, and an error in place of any other."""
    push_messages = start_client_internal._push_messages

    def push_whole_messages(state: Any, object_store: ObjectStore, send: Send, push_object: Any) -> None:
        broken: list[Message] = []

        def goes_on() -> bool:
            return bool(state.get_tasks(statuses=[Status.STARTING, Status.RUNNING]))

        def send_when_complete(message: Any, tree: Any, runtime: float) -> Any:
            try:
                wait_until_complete(object_store, tree, goes_on)
            except TimeoutError:
                broken.append(message)
                raise
            return send(message, tree, runtime)

        push_messages(state, object_store, send_when_complete, push_object)
        for message in broken:
            start_client_internal._insert_message(in_place_of(message), state, object_store)
        if broken:
            push_messages(state, object_store, send, push_object)

    start_client_internal._push_messages = push_whole_messages


def in_place_of(reply: Message) -> Message:
    """Flower's error message for a ClientApp that has stopped, with the metadata of a reply."""
    return make_message(metadata=copy.copy(reply.metadata), error=CLIENT_APP_CRASHED_ERROR)


def refuse_unapproved_apps(site: Path) -> None:
    """Let the SuperNode of this process answer for apps that its hospital has not approved.

    Their code is not even unpacked; log and page say it, once an hour for each app. What is approved is
    looked up each time, so an approval counts from the next message on.
    site: site.yaml.
    """
    pull = start_client_internal._pull_and_store_message
    told: dict[str, float] = {}

    def pull_approved(*, receive: Any, get_fab: Any, state: Any, object_store: Any, **more: Any) -> Any:
        received: list[Any] = []

        def remembered() -> Any:
            received.append(receive())
            return received[-1]

        def approved(digest: str, run_id: int) -> Any:
            config = load_site_config(site)
            any_app = config.connection is not None and config.connection.any_app
            if not any_app and digest not in {found.bundle for found in read_approvals(config.approvals)}:
                raise _NotApproved(digest)
            return get_fab(digest, run_id)

        try:
            return pull(receive=remembered, get_fab=approved, state=state, object_store=object_store, **more)
        except _NotApproved as refusal:
            digest = str(refusal)
            if time.monotonic() - told.get(digest, -SAID_AGAIN) >= SAID_AGAIN:
                told[digest] = time.monotonic()
                note_unapproved(load_site_config(site).state_dir, digest)
                log.warning(
                    "refused: the app with SHA-256 %s is not approved here; to run it, review and approve it "
                    "with `perennial site approve`",
                    digest,
                )
            message, _ = received[0]
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, NOT_APPROVED), reply_to=message)
            start_client_internal._insert_message(reply, state, object_store)
            return message.metadata.run_id

    start_client_internal._pull_and_store_message = pull_approved


class _NotApproved(Exception):
    """An app that this site has not approved; the text is its SHA-256."""


def poll_adaptively() -> int:
    """Let the SuperNode of this process look often while there is work, and wake the SuperExec for a message.

    Flower sleeps 3 s between two questions for a message and half a second between two looks for a reply.
    Here it hardly sleeps where the SuperLink lets a question wait (deploy/waiting_pulls.py). Else it sleeps a
    tenth of the time since the latest message came or reply went, and never longer than Flower does.
    Returns the descriptor of the pipe that wakes the SuperExec.
    """
    pull, push = start_client_internal._pull_and_store_message, start_client_internal._push_messages
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    latest = time.monotonic()
    answered_at_once = 0
    """Questions since the last that waited or brought a message."""
    asking = True
    """Whether the next look is for a message, and not for a reply."""

    def pull_and_wake(**arguments: Any) -> Any:
        nonlocal latest, answered_at_once, asking
        asked = time.monotonic()
        run = pull(**arguments)
        answered_at_once, asking = answered_at_once + 1, run is None
        if run is not None or time.monotonic() - asked > WAITED:
            answered_at_once = 0
        if run is not None:
            latest = time.monotonic()
            with suppress(BlockingIOError):  # full of bytes that will wake it as well
                os.write(writes, b"1")
        return run

    def push_and_note(**arguments: Any) -> None:
        nonlocal latest
        push(**arguments)
        latest = time.monotonic()

    def sleep(seconds: float) -> None:
        patience = 0 if asking and answered_at_once <= 1 else (time.monotonic() - latest) / 10
        time.sleep(min(seconds, max(SHORTEST_SLEEP, patience)))

    give_own(start_client_internal, "time", sleep=sleep)
    start_client_internal._pull_and_store_message = pull_and_wake
    start_client_internal._push_messages = push_and_note
    start_client_internal.pull_objects = partial(  # pyright: ignore[reportPrivateImportUsage]
        start_client_internal.pull_objects,  # pyright: ignore[reportPrivateImportUsage]
        initial_backoff=FIRST_WAIT,
    )
    return reads


def hear_of_killed_clientapps() -> int:
    """Let the SuperNode of this process answer at once for a ClientApp that was killed.

    Flower waits a minute for its heartbeat. Returns the descriptor of a pipe that takes tokens, one a line.
    """
    push = start_client_internal._push_messages
    reads, writes = os.pipe()
    states: list[Any] = []

    def push_and_know(*, state: Any, **more: Any) -> None:
        states[:] = [state]
        push(state=state, **more)

    def hear() -> None:
        with os.fdopen(reads) as lines:
            for line in lines:
                for state in states:
                    expire_token(state, line.strip())

    start_client_internal._push_messages = push_and_know
    threading.Thread(target=hear, name="killed ClientApps", daemon=True).start()
    return writes


def expire_token(state: Any, token: str) -> None:
    """Make the heartbeat of a token's task overdue, so that Flower gives it up. state: its NodeState.

    A message that the task had not fetched yet counts as fetched: Flower answers for no other, and a
    SuperNode, which handles one message at a time, would wait for that answer for ever.
    """
    with state.lock_task_store:
        task = state.task_store.get(state.task_token_to_task_id.get(token))
        record = None if task is None else state.task_token_store.get(task.task_id)
        if task is None or record is None:
            return
        log.warning("a ClientApp was killed; the server is told")
        with state.lock_msg_store:
            for entry in state.msg_store.values():
                if (
                    entry.message.metadata.run_id == task.run_id
                    and not entry.message.metadata.reply_to_message_id
                ):
                    entry.is_retrieved = True
        record.active_until = datetime.datetime.fromtimestamp(0, datetime.UTC)


def beat_often() -> None:
    """Let the SuperNode of this process send heartbeats more often, so that its end is noticed sooner."""
    vars(supernode_heartbeat)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT


def note_answers(path: Path) -> None:
    """Let the SuperNode of this process touch `path` whenever the SuperLink has answered it."""
    pull = start_client_internal._pull_and_store_message
    beat = supernode_heartbeat.HeartbeatSender._heartbeat
    noted = -NOTED_EVERY

    def note() -> None:
        nonlocal noted
        if time.monotonic() - noted > NOTED_EVERY:
            noted = time.monotonic()
            renew(path)

    def pull_and_note(*, receive: Any, **more: Any) -> Any:
        def receive_and_note() -> Any:
            received = receive()
            note()
            return received

        return pull(receive=receive_and_note, **more)

    def beat_and_note(self: Any) -> None:
        beat(self)
        note()

    start_client_internal._pull_and_store_message = pull_and_note
    supernode_heartbeat.HeartbeatSender._heartbeat = beat_and_note


def note_own_node(state_dir: Path) -> None:
    """Let the SuperNode of this process record its node id, for the next one if this one is killed."""
    connect = start_client_internal._init_connection

    @contextmanager
    def connect_and_note(**settings: Any) -> Iterator[Any]:
        with connect(**settings) as connection:
            note_node(state_dir, connection[0])
            yield connection

    start_client_internal._init_connection = connect_and_note


if __name__ == "__main__":
    plain_logs()
    site = Path(sys.argv.pop(1))
    beat_often()
    send_whole_replies()
    refuse_unapproved_apps(site)
    wake, killed = poll_adaptively(), hear_of_killed_clientapps()
    os.environ |= {WAKE: str(wake), KILLED: str(killed)}
    superexec = [sys.executable, "-m", "perennial.deploy.superexec_process"]
    end_with_child(start_client_internal, "flower-superexec", instead=superexec, inherits=[wake, killed])
    state = load_site_config(site).state_dir
    note_answers(state / ANSWERED)
    note_own_node(state)
    with sole_owner(place(state), "the SuperNode"), beating(state / ALIVE):
        flower_supernode()
