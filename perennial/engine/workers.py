"""A Flower Grid that spreads the sites over worker processes, a site always on the same one.

Of a message, its content travels between the processes, and of its metadata what the other end does not
know. A record that several messages share crosses once for each worker, so a round's model does.
"""

import gc
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

from flwr.app import Context, Error, Message, RecordDict

from perennial.engine.cohorts import Cohorts
from perennial.engine.frames import Frame, decode_frames, encode_frames
from perennial.engine.grid import Client, InProcessGrid, answer_messages, give_number, set_task_identity
from perennial.foundation import plugins
from perennial.foundation.errors import StateError
from perennial.protocol.stack import list_answered

LONGEST_WAIT = 1.0
"""Seconds that one look at the workers may block, so that a round's deadline is noticed."""
CRASHED = 8
"""Flower's code of the error that a SuperNode sends for a ClientApp that died."""
PATIENCE = 5.0
"""Seconds that a worker has to end after its connection has closed."""
_LENGTH = 4
"""Bytes of the number of messages that are answered together."""


@dataclass
class _Worker:
    """One process as the server sees it. pending: message id -> message whose reply has not come."""

    name: str
    process: BaseProcess
    connection: Connection
    pending: dict[str, Message] = field(default_factory=dict)

    def send(self, parts: Sequence[Sequence[Message]], contents: "_Contents") -> None:
        """Send messages in parts that are answered together: each part's length, then its messages.

        A message that brings another content than the one before it announces that, and the content follows.
        Raises OSError when the process is gone.
        """
        self.pending |= {message.metadata.message_id: message for part in parts for message in part}
        crossed: RecordDict | None = None
        for part in parts:
            self.connection.send_bytes(len(part).to_bytes(_LENGTH))
            for message in part:
                follows = message.content != crossed
                self.connection.send_bytes(json.dumps([follows, _request_facts(message)]).encode())
                if follows:
                    crossed = message.content
                    for piece in contents.serialise(crossed):
                        self.connection.send_bytes(piece)

    def receive(self) -> Message:
        """Raises EOFError or OSError when the process is gone."""
        request, error = json.loads(self.connection.recv_bytes())
        content = decode_frames(self.connection.recv_bytes, self.pending) if error is None else Error(*error)
        reply = Message(content, reply_to=self.pending[request])
        for message_id in list_answered(reply):
            self.pending.pop(message_id, None)
        return reply

    def end(self) -> None:
        """Close the connection, which ends the process."""
        self.connection.close()
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


class _Contents:
    """Serialises what several messages share, as a round's model, once for all workers."""

    def __init__(self) -> None:
        self._last: tuple[RecordDict, list[Frame]] | None = None

    def serialise(self, content: RecordDict) -> list[Frame]:
        if self._last is None or self._last[0] != content:
            self._last = content, [*encode_frames(content)]
        return self._last[1]


class WorkerGrid(InProcessGrid):
    """A Grid over worker processes: sites, by position, are assigned to the workers in turn.

    Cohorts are dealt out in the order in which they were cut. What a site remembers lies on the disk, so any
    worker can answer for it; one that still answers an earlier message of a site gets the next one too.

    client: the ClientApp; under spawn something that can be imported by name. workers: at least 1.
    start_method: fork shares what is already in memory; a process that has used CUDA can only spawn.
    devices: assigned to the workers in turn; none: each takes what the contexts say.

    A worker that dies answers every message it still had with an error that names it and the signal; its
    sites move to the workers that are left, without their Context.state. Raises StateError, from push and
    pull, when none is left.
    """

    def __init__(
        self,
        client: Client,
        contexts: dict[int, Context],
        workers: int,
        start_method: Literal["fork", "spawn"] = "fork",
        cohorts: Cohorts | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        super().__init__(client, contexts, cohorts)
        self._positions = {node: position for position, node in enumerate(contexts)}
        self._returned: list[Message] = []
        self._workers: list[_Worker] = []
        # the two kinds share no type that has both Process and Pipe
        context = get_context("fork") if start_method == "fork" else get_context("spawn")
        for number in range(min(workers, len(contexts))):
            ours, theirs = context.Pipe()
            # forked processes inherit the server's ends, and would keep each other alive by them
            inherited = [worker.connection for worker in self._workers] + [ours]
            own = _change_device(contexts, devices[number % len(devices)]) if devices else contexts
            process = context.Process(
                target=_work,
                args=(
                    client,
                    cohorts,
                    own,
                    theirs,
                    inherited if start_method == "fork" else [],
                    plugins.find_in_use(),
                ),
                name=f"worker {number + 1}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(f"worker {number + 1}", process, ours))
        self._alive = list(self._workers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send each message to its site's worker; returns their ids. Raises StateError if no worker lives."""
        self._require_worker()
        messages = list(messages)
        ids = [self._number(message) for message in messages]
        shares: dict[str, tuple[_Worker, list[list[Message]]]] = {}
        for number, cohort in enumerate(self._cut(messages)):
            for worker, part in self._deal(number, cohort):
                shares.setdefault(worker.name, (worker, []))[1].append(part)
        contents = _Contents()
        for worker, parts in shares.values():
            try:
                worker.send(parts, contents)
            except OSError:
                self._bury(worker)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, after waiting up to LONGEST_WAIT seconds if some are due."""
        if not self._returned and not any(worker.pending for worker in self._alive):
            return []
        ready = wait([worker.connection for worker in self._alive], 0 if self._returned else LONGEST_WAIT)
        for worker in [worker for worker in self._alive if worker.connection in ready]:
            try:
                while worker.connection.poll():
                    self._returned.append(worker.receive())
            except (EOFError, OSError):
                self._bury(worker)
        self._require_worker()
        replies, self._returned = self._returned, []
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        waiting = set(self.push_messages(messages))
        start = time.monotonic()
        while waiting and (timeout is None or time.monotonic() - start < timeout):
            for reply in self.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply

    def close(self) -> None:
        """End all workers; replies that they were working on are lost."""
        for worker in self._alive:
            worker.end()
        self._alive = []

    def _deal(self, number: int, cohort: list[Message]) -> list[tuple[_Worker, list[Message]]]:
        """Who answers a cohort, the number-th of its round: one worker, but for sites that one still has."""
        if len(cohort) == 1:
            return [(self._find_worker(cohort[0].metadata.dst_node_id), cohort)]
        busy = {
            message.metadata.dst_node_id: worker
            for worker in self._alive
            for message in worker.pending.values()
        }
        free = [message for message in cohort if message.metadata.dst_node_id not in busy]
        late = [message for message in cohort if message.metadata.dst_node_id in busy]
        dealt = [(busy[message.metadata.dst_node_id], [message]) for message in late]
        return [(self._alive[number % len(self._alive)], free), *dealt] if free else dealt

    def _find_worker(self, node: int) -> _Worker:
        for worker in self._alive if self._cohorts is not None else ():
            if any(message.metadata.dst_node_id == node for message in worker.pending.values()):
                return worker
        position = self._positions[node]
        home = self._workers[position % len(self._workers)]
        return home if home in self._alive else self._alive[position % len(self._alive)]

    def _bury(self, worker: _Worker) -> None:
        """A worker is gone: its messages come back as errors."""
        self._alive = [other for other in self._alive if other.name != worker.name]
        worker.end()
        reason = _describe_death(worker)
        self._returned += [
            Message(Error(CRASHED, reason), reply_to=message) for message in worker.pending.values()
        ]
        worker.pending.clear()

    def _require_worker(self) -> None:
        if not self._alive:
            causes = "; ".join(_describe_death(worker) for worker in self._workers)
            raise StateError(f"no worker is left: {causes}; the run can be resumed")


def _change_device(contexts: dict[int, Context], device: str) -> dict[int, Context]:
    """The contexts with another device in their settings."""
    return {
        node: Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=context.node_config,
            state=context.state,
            run_config={**context.run_config, "device": device},
        )
        for node, context in contexts.items()
    }


def _describe_death(worker: _Worker) -> str:
    code = worker.process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"{worker.name} (process {worker.process.pid}) ended with {how}"


def _work(
    client: Client,
    cohorts: Cohorts | None,
    contexts: dict[int, Context],
    connection: Connection,
    inherited: Sequence[Connection],
    named: plugins.InUse,
) -> None:
    """The main loop of a worker: answer messages in the order of arrival until the connection closes."""
    for other in inherited:
        other.close()
    # what the server imported stays for good; a search of it takes far longer than a round of a small run
    gc.freeze()
    # Ctrl-C reaches every process of a terminal; the server decides what it means and closes the connections
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_task_identity()
    arrived: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(connection, arrived), daemon=True).start()
    record = RecordDict()
    while True:
        messages: list[Message] = []
        for _ in range(int.from_bytes(arrived.get())):
            follows, facts = json.loads(arrived.get())
            if follows:
                record = decode_frames(arrived.get, {})
            messages.append(_request(record, **facts))
        with plugins.restore_in_use(named):
            replies = answer_messages(client, cohorts, messages, contexts)
        for reply in replies:
            error = [reply.error.code, reply.error.reason] if reply.has_error() else None
            connection.send_bytes(json.dumps([reply.metadata.reply_to_message_id, error]).encode())
            for piece in encode_frames(reply.content) if error is None else ():
                connection.send_bytes(piece)


def _request_facts(message: Message) -> dict[str, Any]:
    """The metadata that a worker does not know; _request() takes them."""
    facts = message.metadata
    return {
        "number": facts.message_id,
        "node": facts.dst_node_id,
        "kind": facts.message_type,
        "ttl": facts.ttl,
        "group": facts.group_id,
    }


def _request(content: RecordDict, number: str, node: int, kind: str, ttl: float, group: str) -> Message:
    return give_number(Message(content, node, kind, ttl=ttl, group_id=group), number)


def _receive(connection: Connection, arrived: SimpleQueue[bytes]) -> None:
    """Take messages off the connection as they come: a server that sends never waits for a site that trains.

    Ends the process when the server closes its end or dies, so that no worker outlives it.
    """
    try:
        while True:
            arrived.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
