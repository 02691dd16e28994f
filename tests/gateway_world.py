"""A gateway on a port of its own, before a SuperLink that notes what reaches it."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.requests import Request
from starlette.responses import Response

from perennial.deploy.certificates import encode_public_line, make_node_key
from perennial.deploy.federation import Federation, OperatorFolder, SiteRecord, create_operator_folder
from perennial.deploy.gateway import LIST_RUNS, Gateway, make_settings
from perennial.deploy.handshake import sign_headers

NODE = str(2**64 - 7)
"""Flower's number of graz."""
NAMES = ("graz", "linz", "wels")


@dataclass
class World:
    """A federation's gateway on a port, before a SuperLink that notes what reaches it."""

    folder: OperatorFolder
    keys: dict[str, ec.EllipticCurvePrivateKey]
    port: int = 0
    reached: list[tuple[str, str, bytes]] = field(default_factory=list)
    answers: list[Response] = field(default_factory=list)
    gateway: Gateway | None = None

    async def superlink(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.body()
        path = scope["raw_path"].decode()
        if path == LIST_RUNS:
            await Response(b"")(scope, receive, send)
            return
        self.reached.append((request.method, path, body))
        answer = self.answers.pop(0) if self.answers else Response(b"answer")
        await answer(scope, receive, send)

    @property
    def authority(self) -> Path:
        return self.folder.certificates / "ca.crt"

    def post(self, path: str, key: str | None = "graz", method: str = "POST", **more: Any) -> httpx.Response:
        """A request with the path as it stands: httpx normalises nothing of a raw path."""
        headers = sign_headers(self.keys[key]) if key else {}
        context = ssl.create_default_context(cafile=self.authority)
        with httpx.Client(verify=context, timeout=30) as client:
            url = httpx.URL(f"https://127.0.0.1:{self.port}").copy_with(raw_path=path.encode())
            headers |= more.pop("headers", {})
            return client.request(method, url, content=more.pop("content", b""), headers=headers)

    def raw(self, request: bytes) -> bytes:
        """The first bytes that come back for bytes on a TLS connection."""
        context = ssl.create_default_context(cafile=self.authority)
        with (
            socket.create_connection(("127.0.0.1", self.port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as there,
        ):
            there.sendall(request)
            try:
                return there.recv(4096)
            except OSError:
                return b""

    def signed(self, key: str = "graz") -> bytes:
        return "".join(
            f"{name}: {value}\r\n" for name, value in sign_headers(self.keys[key]).items()
        ).encode()


def make_reply(node: int = int(NODE), *, answers: str = "question", root: str = "reply") -> bytes:
    """What push-messages holds: a reply without content, and the tree of its objects."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
    from flwr.proto.node_pb2 import Node

    facts = Metadata(
        run_id=7, message_id="reply", src_node_id=node, dst_node_id=1, reply_to_message_id=answers
    )
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id="a"), ObjectTree(object_id="b")])
    request = PushMessagesRequest(node=Node(node_id=int(NODE)), messages_list=[Message(metadata=facts)])
    request.message_object_trees.append(tree)
    request.clientapp_runtime_list.append(1.5)
    return request.SerializeToString()


@contextmanager
def serve_world(path: Path) -> Iterator[World]:
    """Graz is registered, linz revoked, and wels added, until the end."""
    settings = Federation(name="trials", hosts=("127.0.0.1",), runtime="process")
    folder = create_operator_folder(path, settings, 2)
    keys = {name: make_node_key() for name in (*NAMES, "stranger")}
    for name in NAMES:
        folder.add_site(name, encode_public_line(keys[name]))
    folder.write_site("graz", SiteRecord(state="registered", node=NODE))
    folder.write_site("linz", SiteRecord(state="revoked", node="2"))
    world = World(folder, keys)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=world.superlink), base_url="https://superlink"
    )
    world.gateway = Gateway(folder, client)
    more = make_settings(folder) | {"host": "127.0.0.1", "port": 0}
    server = uvicorn.Server(uvicorn.Config(world.gateway.app(), **more))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    world.port = server.servers[0].sockets[0].getsockname()[1]
    yield world
    server.should_exit = True
    thread.join(10)
