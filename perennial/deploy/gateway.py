"""The only port that sites reach: passes the calls of Flower's Fleet API to the SuperLink, and nothing else.

From 1.40 on, Flower's SuperLink has its Fleet, Control and Runtime APIs at one port, and whoever reaches the
Control API can start runs. So the SuperLink listens on loopback, and this process (`python -m
perennial.deploy.gateway FOLDER`) stands before it. A request gets through if its path is one of FLEET, letter
for letter, and its headers are signed with the key of a registered site. A question for messages waits here
until there is one. What Flower answers to a site, this notes: who is connected, and since when one is silent.
"""

import asyncio
import base64
import datetime
import json
import logging
import ssl
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as Refusal
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from perennial.deploy.certificates import read_validity
from perennial.deploy.control import PROTOBUF, RunBook, decode_fields, decode_once, encode_fields, parse_runs
from perennial.deploy.federation import OperatorFolder
from perennial.deploy.handshake import CLOCK, CONNECTED
from perennial.deploy.site_keys import Keys
from perennial.deploy.superlink import STATUS
from perennial.deploy.traffic import (
    CONNECTIONS,
    MIB,
    Connection,
    Room,
    cut_body,
    raise_open_files,
    read_body,
    send_answer,
)
from perennial.foundation.errors import PerennialError, StateError, clean_text
from perennial.foundation.files import replace_file
from perennial.foundation.heartbeat import BEAT, renew

log = logging.getLogger("perennial.gateway")
KIB = 2**10
FLEET = {
    b"/v1/fleet/activate-node": 64 * KIB,
    b"/v1/fleet/deactivate-node": 64 * KIB,
    b"/v1/fleet/send-node-heartbeat": 64 * KIB,
    b"/v1/fleet/pull-messages": 64 * KIB,
    b"/v1/fleet/push-messages": 256 * KIB,
    b"/v1/fleet/get-run": 64 * KIB,
    b"/v1/fleet/get-fab": 64 * KIB,
    b"/v1/fleet/push-object": 512 * MIB,
    b"/v1/fleet/pull-object": 64 * KIB,
    b"/v1/fleet/confirm-message-received": 64 * KIB,
}
"""Every path that passes, and the most bytes of its body. A site registers at the operator, not by itself.

Flower cuts arrays into objects of 5 MiB. A reply has as many objects as their names, of 68 bytes, fit into
push-messages: about 3,800, which keep the SuperLink busy for 7 s.
"""
ADMISSION = b"/admission"
"""Answered here, to a registered site: is a SuperNode connected with its key."""
ACTIVATE, DEACTIVATE = "/v1/fleet/activate-node", "/v1/fleet/deactivate-node"
PULL = "/v1/fleet/pull-messages"
SAME_AGAIN = {b"/v1/fleet/pull-object", b"/v1/fleet/get-fab"}
"""Large answers. They may be refused when they are there, because asking again changes nothing."""
REPLY, OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
LIST_RUNS = "/v1/control/list-runs"
KEY, SIGNATURE, TIME = "flwr-public-key", "flwr-signature", "flwr-timestamp"
WINDOW = (-5.0, 305.0)
"""Seconds that a signed time may lie in the past, as Flower has it."""
HOLD = 8.0
"""Most seconds that a question for messages waits."""
LOOKS = (0.1, 1.0)
"""Seconds between two looks for a message: a tenth of the time since the node's last one, within these."""
WAITS = (0.2, 0.4, 0.8)
"""Seconds after which an answer 500, as from a busy database, is asked for again."""
REPLY_BYTES, REPLY_TREES = 2048 * MIB, 8
"""For each message that a site gets: the most bytes of objects that are stored, and the most lists of them.

Flower's client sends the list again if the answer to it was lost."""
AT_ONCE = 4
"""Messages whose replies a site may have outstanding."""
SILENT = 40.0
"""Seconds without a request after which a site is silent, and its SuperNode dead for one that comes.

While its app works, it beats every 20 to 27."""


@dataclass
class Seen:
    """One site's node as its requests show it. last: time of its newest answer; 0 before the first.

    waiting: questions for messages that wait here. bytes, trees: what it may still store for its replies.
    """

    last: float = 0.0
    message: float = 0.0
    waiting: int = 0
    bytes: int = REPLY_BYTES
    trees: int = REPLY_TREES


class Gateway:
    """The application. upstream: a client of the SuperLink, with its address as base_url."""

    def __init__(self, folder: OperatorFolder, upstream: httpx.AsyncClient) -> None:
        self._folder, self._upstream = folder, upstream
        self._keys, self._book = Keys(folder), RunBook(folder.apps)
        # what is served until a restart, whatever `deploy rotate` writes meanwhile
        self._served = read_validity(folder.certificates / "server.pem")
        self.seen: defaultdict[str, Seen] = defaultdict(Seen)
        """By Flower's number of a node: a site that comes back with a new key is a new node."""
        self._arrived, self._room = asyncio.Event(), Room()
        self._damaged = ""

    def app(self) -> ASGIApp:
        """The ASGI application: requests go to answer(); whatever is no HTTP is refused."""
        starlette = Starlette(lifespan=self._lifespan)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await starlette(scope, receive, send)
            elif scope["type"] == "http":
                with ExitStack() as held:
                    answer = await self.answer(Request(scope, receive), held)
                    await send_answer(answer, scope, receive, send)
            else:  # an upgrade to a web socket
                await send({"type": "websocket.close", "code": 1008})

        return serve

    async def answer(self, request: Request, held: ExitStack) -> Response:
        """Answer one request; one that may not pass is answered here, and the SuperLink never sees it.

        held: keeps the room that the request takes until the answer has been sent.
        """
        try:
            path = request.scope.get("raw_path", b"")
            if (path not in FLEET and path != ADMISSION) or request.scope["query_string"]:
                raise Refusal(404, "not found")
            if request.method != "POST":
                raise Refusal(405, "method not allowed")
            named = [key.lower() for key, _ in request.headers.raw if key.lower().startswith(b"flwr-")]
            if len(named) != len(set(named)):
                # this would look at one of them, and the SuperLink at another
                raise Refusal(400, "a header stands twice")
            name = self._identify(request.headers)
            if path == ADMISSION:
                return PlainTextResponse("free" if self._silent_since(name) is not None else "connected")
            take = held.enter_context(self._room.enter(name))
            body = await read_body(request, FLEET[path], take)
            answer = await self._pass(path.decode("ascii"), name, body, request)
            if path in SAME_AGAIN:
                take(len(answer.body))
            return answer
        except Refusal as refusal:
            return PlainTextResponse(f"{refusal.detail}\n", refusal.status_code)
        except ClientDisconnect:
            return Response(status_code=400)
        except httpx.TransportError as error:
            log.warning("the SuperLink does not answer: %s", error or type(error).__name__)
            return PlainTextResponse("the SuperLink does not answer\n", 503)

    def _identify(self, headers: Mapping[str, str]) -> str:
        """The site whose key signed a request. Raises Refusal."""
        try:
            key, signature = (base64.b64decode(headers[name], validate=True) for name in (KEY, SIGNATURE))
            signed = headers[TIME]
            public = serialization.load_pem_public_key(key)
            if not isinstance(public, ec.EllipticCurvePublicKey):
                raise ValueError("another kind of key")
            public.verify(signature, signed.encode("ascii"), ec.ECDSA(hashes.SHA256()))
            age = time.time() - datetime.datetime.fromisoformat(signed).timestamp()
        except (KeyError, ValueError, InvalidSignature, UnsupportedAlgorithm):
            raise Refusal(401, "no valid signature of a site") from None
        name = self._keys.name(key)
        if not WINDOW[0] < age < WINDOW[1]:
            raise Refusal(401, CLOCK)
        return name

    async def _pass(self, path: str, name: str, body: bytes | bytearray, request: Request) -> Response:
        seen, headers = self._find_seen(name), request.headers
        passed = {key: value for key, value in headers.items() if key.startswith("flwr-")}
        passed["content-type"] = headers.get("content-type", PROTOBUF)
        if path == REPLY:
            _check_reply(bytes(body), int(self._keys.records[name].node))
        if (path == REPLY and seen.trees < 1) or (path == OBJECT and seen.bytes < len(body)):
            log.warning("%s: a reply is larger than may be", name)
            raise Refusal(413, "the reply is too large")
        if path == ACTIVATE:
            reply = await self._admit_node(name, seen, body, passed)
        elif path == PULL:
            reply = await self._pull(seen, body, passed, request)
        else:
            reply = await self._ask(path, body, passed)
        if reply.is_success:
            seen.last = 0.0 if path == DEACTIVATE else time.time()
            seen.trees -= path == REPLY
            # Flower answers nothing where it has not stored the object
            seen.bytes -= len(body) if path == OBJECT and reply.content else 0
        kept = {key: value for key, value in reply.headers.items() if key.startswith("flwr-")}
        kind = reply.headers.get("content-type", PROTOBUF)
        return Response(reply.content, reply.status_code, kept, media_type=kind)

    async def _admit_node(
        self, name: str, seen: Seen, body: bytes | bytearray, headers: dict[str, str]
    ) -> httpx.Response:
        """Let a node in; where only its killed predecessor stands in the way, sign off for that first."""
        reply = await self._ask(ACTIVATE, body, headers)
        if not reply.is_success and not seen.waiting and time.time() - seen.last > SILENT:
            # in what the site itself has signed just now
            node = encode_fields((1, int(self._keys.records[name].node)))
            await self._ask(DEACTIVATE, node, headers | {"content-type": PROTOBUF})
            reply = await self._ask(ACTIVATE, body, headers)
            log.info("%s: an earlier SuperNode had not signed off; a new one takes its place", name)
        if not reply.is_success and reply.status_code < 500:
            log.warning("%s is not let in: %s", name, clean_text(reply.text, 300))
            raise Refusal(reply.status_code, CONNECTED)
        return reply

    async def _pull(
        self, seen: Seen, body: bytes | bytearray, headers: dict[str, str], request: Request
    ) -> httpx.Response:
        """Hold a question until there is a message, HOLD seconds have passed, or nobody asks any more."""
        until = time.monotonic() + HOLD
        seen.waiting += 1
        try:
            while True:
                arrived = self._arrived
                reply = await self._ask(PULL, body, headers)
                if reply.is_success and reply.content:
                    seen.message = time.time()
                    seen.bytes = min(seen.bytes + REPLY_BYTES, AT_ONCE * REPLY_BYTES)
                    seen.trees = min(seen.trees + REPLY_TREES, AT_ONCE * REPLY_TREES)
                    # a round is for all sites at once: whoever waits looks now
                    self._arrived = asyncio.Event()
                    arrived.set()
                    return reply
                if not reply.is_success or time.monotonic() > until or await request.is_disconnected():
                    return reply
                seen.last = time.time()
                wait = min(LOOKS[1], max(LOOKS[0], (time.time() - seen.message) / 10))
                try:
                    await asyncio.wait_for(arrived.wait(), wait)
                except TimeoutError:
                    continue
        finally:
            seen.waiting -= 1

    async def _ask(self, path: str, body: bytes | bytearray, headers: dict[str, str]) -> httpx.Response:
        headers = headers | {"content-length": str(len(body))}
        for wait in WAITS:
            reply = await self._upstream.post(path, content=cut_body(body), headers=headers)
            if reply.status_code != 500:
                return reply
            await asyncio.sleep(wait)
        return await self._upstream.post(path, content=cut_body(body), headers=headers)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        telling = asyncio.create_task(self._tell())
        yield
        telling.cancel()

    async def _tell(self) -> None:
        """Keep the status beside the runs, for pages and `deploy status` (deploy/superlink.py)."""
        path, failed = self._folder.state / "runs" / STATUS, ""
        while True:
            try:
                status = await self.status()
                replace_file(path, json.dumps(status).encode(), mode=0o644, durable=False)
                failed = ""
            except (OSError, ValueError, PerennialError, httpx.HTTPError) as error:
                if str(error) != failed:
                    failed = str(error)
                    log.warning("what the pages know of the SuperLink is not up to date: %s", error)
                if not isinstance(error, httpx.HTTPError) and path.exists():
                    renew(path)
            await asyncio.sleep(BEAT)

    async def status(self) -> dict[str, Any]:
        """The status as of now. Raises httpx.HTTPError while the SuperLink does not answer."""
        reply = await self._upstream.post(LIST_RUNS, content=b"", headers={"content-type": PROTOBUF})
        reply.raise_for_status()
        runs = parse_runs(reply.content)
        unknown = dict[str, str]()
        try:
            unknown, self._damaged = self._book.find_unknown(runs), ""
        except StateError as error:
            if str(error) != self._damaged:
                self._damaged = str(error)
                log.warning("the pages name no unknown runs: %s", error)
        self._keys.read()
        states = {name: record.state for name, record in self._keys.records.items()}
        return {
            "certificate_ends": min(found.ends for found in self._served).timestamp(),
            "certificate_waits": read_validity(self._folder.certificates / "server.pem") != self._served,
            "sites": {name: self._silent_since(name) for name in states if states[name] == "registered"},
            "others": {name: state for name, state in states.items() if state != "registered"},
            "unknown": unknown,
        }

    def _find_seen(self, name: str) -> Seen:
        return self.seen[self._keys.records[name].node]

    def _silent_since(self, name: str) -> float | None:
        seen = self._find_seen(name)
        return None if seen.waiting or time.time() - seen.last < SILENT else round(seen.last, 1)


def _check_reply(body: bytes, node: int) -> None:
    """Raise Refusal unless push-messages holds one reply, from this node, and the list of its own objects.

    Flower looks whose key signed the request, and not at the sender in the message: without a message that it
    answers, and from node 1, it would be the server's to another site.
    """
    try:
        (first, message), (second, tree) = [part for part in decode_fields(body) if part[0] in (2, 3)]
        facts = decode_once(decode_once(message)[1])
        roots = [root for number, root in decode_fields(tree) if number == 1]
        # whoever reads text ignores a number in its place
        answers = isinstance(facts[5], bytes) and facts[5] != b""
        if not answers or (first, second, facts[3], roots) != (2, 3, node, [facts[2]]):
            raise ValueError("no reply of this node")
    except (KeyError, TypeError, ValueError):
        raise Refusal(400, "found no single reply of this site") from None


def make_settings(folder: OperatorFolder) -> dict[str, Any]:
    """How uvicorn serves the application."""
    return {
        "host": folder.federation.fleet_host,
        "port": folder.federation.fleet_port,
        "loop": "perennial.deploy.traffic:make_loop",
        "http": Connection,
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "ssl_certfile": folder.certificates / "server.pem",
        "ssl_keyfile": folder.certificates / "server.key",
        "limit_concurrency": CONNECTIONS,
        "timeout_graceful_shutdown": 5,
    }


def main(path: Path) -> None:
    """Serve until this process is asked to end."""
    raise_open_files()
    logging.basicConfig(format="%(levelname)s %(asctime)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = OperatorFolder(path)
    federation, certificates = folder.federation, folder.certificates
    trust = ssl.create_default_context(cafile=certificates / "ca.crt")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    upstream = httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{federation.control_port}", verify=trust, timeout=120, limits=limits
    )
    uvicorn.run(Gateway(folder, upstream).app(), **make_settings(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
