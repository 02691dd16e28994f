"""live.jsonl: what a run does at this moment, for the pages.

The journal has one line for a round that is over. Here is the round that is not: who was asked, who has
answered, who is connected, for whom the run waits. The file begins anew with every round, and nothing depends
on it: what cannot be written is left out.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from perennial.foundation.errors import ProtocolError
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import Refusal
from perennial.protocol.stack import find_stack, is_parcel, list_answered, open_parcel, pack_parcel
from perennial.server.journal import LIVE_STATUS
from perennial.strategies.round.exchange import describe_error


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


class ParcelGrid(ForwardingGrid):
    """A grid that sends parcels and opens those that come back; it stands next to Flower's own.

    A site answers with a parcel when it was asked with one. A parcel that cannot be opened goes on as it is,
    so that the reply is dropped, by name, like any other that is no message of ours.
    """

    def _sent(self, message: Message) -> Message:
        # the tensors' bytes are shared, not copied
        message.content = pack_parcel(message.content)
        return message

    def _received(self, reply: Message) -> Message:
        if reply.has_content() and is_parcel(reply.content):
            with suppress(ProtocolError):
                reply.content = open_parcel(reply.content)
        return reply


ONLINE_EVERY = 2.0
"""Seconds between two questions who is connected."""
LOGGED_EVERY = 60.0
"""Seconds between two lines of the log that say for whom a run waits."""


class LiveStatusFile:
    """The file live.jsonl of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LIVE_STATUS
        self._descriptor = -1

    def begin(self, **facts: Any) -> None:
        """Begin a new file, which readers of the old one notice. facts: of the round."""
        self.close()
        with suppress(OSError):
            new = self._path.with_name(f".{LIVE_STATUS}.new")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(new, flags, 0o644)
            self.write("round", **facts)
            # ext4 writes out a file that takes another one's place, which costs a tenth of a short round
            self._path.unlink(missing_ok=True)
            new.rename(self._path)

    def write(self, event: str, **facts: Any) -> None:
        """Append one event, with the time in seconds since 1970."""
        if self._descriptor >= 0:
            with suppress(OSError):
                line = json.dumps({"event": event, "time": round(time.time(), 3), **facts})
                os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ObservedGrid(ForwardingGrid):
    """A grid that notes in live.jsonl who was asked, who has answered and who is connected.

    names: site name by node id, as far as it is known. while_waiting: called at each poll for replies.
    tell: passes an event to the journal's listener, without writing it.
    """

    def __init__(
        self,
        grid: Grid,
        now: LiveStatusFile,
        names: Callable[[], Mapping[int, str]],
        while_waiting: Callable[[], None],
        tell: Callable[..., None],
    ) -> None:
        super().__init__(grid)
        self._now = now
        self._names = names
        self._while_waiting = while_waiting
        self._tell = tell
        self._waiting: dict[str, tuple[str, float]] = {}
        self._online: set[str] = set()
        self._asked_online = self._logged = 0.0

    def begin_round(self, **facts: Any) -> None:
        """Begin a round in live.jsonl with facts of it; replies owed to earlier rounds are forgotten."""
        self._waiting.clear()
        self._now.begin(**facts, online=sorted(self._online))

    def poll(self) -> None:
        """Call while_waiting, note who connected or left, and tell each minute whom the run waits for."""
        self._while_waiting()
        now = time.monotonic()
        if now - self._asked_online >= ONLINE_EVERY:
            self.get_node_ids()
        if not self._waiting:
            self._logged = now
        elif now - self._logged >= LOGGED_EVERY:
            self._logged = now
            since = {site: round(now - asked) for site, asked in self._waiting.values()}
            self._tell("waiting_for", sites=since)

    # Flower's grid

    def get_node_ids(self) -> Iterable[int]:
        nodes = list(self._grid.get_node_ids())
        self._asked_online = time.monotonic()
        names = self._names()
        online = {names[node] for node in nodes if node in names}
        if online != self._online:
            self._now.write("online", came=sorted(online - self._online), left=sorted(self._online - online))
            self._online = online
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        ids = list(self._grid.push_messages(sent))
        names, asked = self._names(), dict[str, list[str]]()
        now = self._logged = time.monotonic()
        for message, message_id in zip(sent, ids, strict=True):
            site = names.get(message.metadata.dst_node_id)
            if message_id and site is not None:
                self._waiting[message_id] = site, now
                asked.setdefault(message.metadata.message_type, []).append(site)
        for kind, sites in asked.items():
            self._now.write("asked", kind=kind, sites=sites)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.poll()
        for reply in self._grid.pull_messages(message_ids):
            fault, refused = _find_fault(reply) if find_stack(reply) is None else ("", False)
            for message_id in list_answered(reply):
                site, _ = self._waiting.pop(message_id, ("", 0.0))
                if site:
                    self._now.write("answered", site=site, fault=fault, refused=refused)
            yield reply


def _find_fault(reply: Message) -> tuple[str, bool]:
    """(what is wrong with a reply, whether the site refused); ("", False) for one that looks right."""
    if reply.has_error():
        return describe_error(reply.error.reason or "unknown"), False
    try:
        if read_kind(reply.content) == Refusal.__name__:
            refusal = Refusal.from_record(reply.content)
            return f"{refusal.kind}: {refusal.reason}", True
    except (ProtocolError, ValueError, TypeError, KeyError, RecursionError) as error:
        return str(error), False
    return "", False
