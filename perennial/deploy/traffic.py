"""What one site, and one stranger, may take of the gateway: memory, time and connections.

Flower's client asks again after an answer 503 and after a broken connection, and after no other refusal. So
whoever is told 503 here waits, and loses nothing.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException as Refusal
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.h11_impl import H11Protocol

MIB = 2**20
TOTAL = 2048 * MIB
"""Bytes of bodies and answers in flight. A site may have half of what the other sites leave of them."""
REQUESTS = 64
"""Requests in flight of one site: they wait, and answers are read before their size is known."""
GRACE, RATE = 30.0, 16 * 1024
"""A body and an answer may take so many seconds, and one more for each so many bytes that have passed.

Flower itself drops a reply of which no object of 5 MiB arrives in 180 s."""
PATIENCE = 10.0
"""Seconds within which a connection says its headers, and before them shakes hands."""
CONNECTIONS = 4096
"""From half of them on, each new connection ends the one that has said nothing for longest."""
PIECE = 2**18

Take = Callable[[int], None]
"""Takes bytes for a request until it is over. Raises Refusal (503) where there is no room for them."""


class Room:
    """The memory for what is in flight, and which site has how much of it."""

    def __init__(self) -> None:
        self._bytes, self._requests = Counter[str](), Counter[str]()

    @contextmanager
    def enter(self, site: str) -> Iterator[Take]:
        """A request of a site. Raises Refusal (503) when too many of its requests are in flight."""
        if self._requests[site] >= REQUESTS:
            raise Refusal(503, "too many requests of this site at once")
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            own = self._bytes[site]
            # whatever a few sites hold, a small body of another one passes
            if own + size > (TOTAL - (self._bytes.total() - own)) // 2:
                raise Refusal(503, "too much is in flight")
            self._bytes[site] += size
            taken += size

        self._requests[site] += 1
        try:
            yield take
        finally:
            self._requests[site] -= 1
            self._bytes[site] -= taken


async def read_body(request: Request, most: int, take: Take) -> bytearray:
    """The body.

    Raises Refusal: 413 once it is longer than `most` bytes, said or not; 503 where there is no room for it,
    or it comes too slowly.
    """
    body = bytearray()  # pieces of a byte each would take 40 times their size
    held = int(request.headers.get("content-length", 0))
    too_long = Refusal(413, f"the body is longer than {most} bytes")
    if held > most:
        raise too_long
    take(held)
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(GRACE) as limit:
            async for part in request.stream():
                size = len(body) + len(part)
                if size > most:
                    raise too_long
                if size > held:  # as in chunks, whose sum nobody has said
                    take(size - held)
                    held = size
                body += part
                limit.reschedule(began + GRACE + size / RATE)
    except TimeoutError:
        raise Refusal(503, "the body comes too slowly") from None
    return body


async def cut_body(body: bytes | bytearray) -> AsyncIterator[bytes]:
    """Yield a body in pieces: sent at once, TLS would copy all of it twice."""
    for start in range(0, len(body), PIECE):
        yield bytes(memoryview(body)[start : start + PIECE])


async def send_answer(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer no faster than it is read; a reader that is too slow loses the connection."""
    began, sent = asyncio.get_running_loop().time(), 0

    async def cut(message: Any) -> None:
        nonlocal sent
        body = message.pop("body", b"")
        if message["type"] != "http.response.body":
            await send(message)
            return
        for start in range(0, len(body) or 1, PIECE):
            more = start + PIECE < len(body)
            await send({**message, "body": body[start : start + PIECE], "more_body": more})
            sent = start + PIECE
            limit.reschedule(began + GRACE + sent / RATE)

    try:
        async with asyncio.timeout(GRACE) as limit:
            await answer(scope, receive, cut)
    except TimeoutError:
        return  # uvicorn closes a connection whose answer is not whole


class Connection(H11Protocol):
    """uvicorn's HTTP on one connection, which ends where nothing is asked on it."""

    _late: asyncio.TimerHandle | None = None
    """When it ends. None while a request is served."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait, in the place of the one that waits longest if there are many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=PIECE)
        most = self.limit_concurrency or CONNECTIONS
        if len(self.connections) > most // 2:
            waiting = [(late.when(), other) for other in self.connections if (late := _read_late(other))]
            if waiting:
                min(waiting, key=lambda pair: pair[0])[1].transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        """Begin a request, go on with one, or with headers that are not whole: these get no more time."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        if self.transport.is_closing() or (self.cycle and not self.cycle.response_complete):
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _read_late(connection: object) -> asyncio.TimerHandle | None:
    return connection._late if isinstance(connection, Connection) else None


def make_loop() -> asyncio.AbstractEventLoop:
    """uvicorn's own event loop, with servers that wait PATIENCE seconds for TLS instead of a minute."""
    loop = auto_loop_factory()()
    prompt = partial(loop.create_server, ssl_handshake_timeout=PATIENCE, ssl_shutdown_timeout=PATIENCE)
    loop.create_server = prompt  # type: ignore[method-assign]  # pyright: ignore
    return loop


def raise_open_files() -> None:
    """Let this process open as many files as its connections need, as far as the system allows."""
    wanted, (soft, hard) = 4 * CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:  # 1,024 under systemd
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
