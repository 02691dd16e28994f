"""What runs apps, in a container of its own that has neither the keys nor a network.

A SuperNode (or SuperLink) gives its tasks to loopback alone. In a folder that both containers mount, it opens
two sockets: whoever connects to its port in the app's container is relayed over the first; the second one
stays open for as long as both sides live, so that each ends when the other does, however that ended.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from threading import Event, Thread

RELAY, TIE = "runtime", "tie"
"""Names of the two sockets."""
AGAIN = 0.2
"""Seconds between two tries to reach the other side."""
CHUNK = 2**18


class Half(StrEnum):
    """Of the processes of a site or of the operator: those that have the keys, or those that run apps."""

    KEYS = "keys"
    APP = "app"


class Partner:
    """The other half, in its own container. gone: whether it was there, and has ended."""

    def __init__(self) -> None:
        self._gone = Event()

    @property
    def gone(self) -> bool:
        return self._gone.is_set()

    def _wait_for_end(self, tie: socket.socket) -> None:
        with tie, suppress(OSError):
            tie.recv(1)  # nothing is ever sent
        self._gone.set()

    @classmethod
    def let_in(cls, folder: Path, port: int) -> "Partner":
        """On the side with the keys: open the sockets in a folder, and lend a port of loopback to the app."""
        found = cls()
        (folder / TIE).unlink(missing_ok=True)
        _serve(_listen(folder / RELAY), lambda: socket.create_connection(("127.0.0.1", port)))

        def tie() -> None:
            # not before the port serves: a connection that is relayed to nobody would end the app's side
            while not _is_serving(port):
                time.sleep(AGAIN)
            # the first one alone: tasks go to one app
            found._wait_for_end(_listen(folder / TIE).accept()[0])

        Thread(target=tie, daemon=True).start()
        return found

    @classmethod
    def join(cls, folder: Path, port: int) -> "Partner":
        """On the side of the app: wait until the sockets are there, and relay a port of loopback to them."""
        found = cls()
        tie = _connect(folder / TIE)
        while tie is None:
            time.sleep(AGAIN)
            tie = _connect(folder / TIE)
        listener = socket.create_server(("127.0.0.1", port))
        _serve(listener, lambda: _connect(folder / RELAY))
        Thread(target=found._wait_for_end, args=(tie,), daemon=True).start()
        return found


def _is_serving(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(64)
    return listener


def _connect(path: Path) -> socket.socket | None:
    """A connection to a socket; None where nobody listens."""
    found = socket.socket(socket.AF_UNIX)
    try:
        found.connect(str(path))
    except OSError:
        found.close()
        return None
    return found


def _serve(listener: socket.socket, connect: Callable[[], socket.socket | None]) -> None:
    """Relay each connection that arrives to one that connect() makes, in threads; a failed one is closed."""

    def relay(near: socket.socket) -> None:
        with near, suppress(OSError):
            far = connect()
            if far is not None:
                with far:
                    back = Thread(target=_copy, args=(far, near), daemon=True)
                    back.start()
                    _copy(near, far)
                    back.join()

    def accept() -> None:
        while True:
            Thread(target=relay, args=(listener.accept()[0],), daemon=True).start()

    Thread(target=accept, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source says that nothing more comes, and say so to the target."""
    with suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
