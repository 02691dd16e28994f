"""No site and no stranger takes the gateway's memory, time or connections from the others."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from starlette.responses import Response

from perennial.deploy import gateway, traffic
from perennial.deploy.federation import SiteRecord
from perennial.deploy.gateway import FLEET, OBJECT, PULL, REPLY, Seen
from tests.gateway_world import NODE, World, make_reply, serve_world

BEAT = "/v1/fleet/send-node-heartbeat"
FETCH = "/v1/fleet/pull-object"
PLACES = 16
"""Connections that this gateway holds; from 8 on, the silent ones make room."""
MIB = 2**20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "CONNECTIONS", PLACES)
        patch.setattr(traffic, "PATIENCE", 2.0)
        with serve_world(tmp_path_factory.mktemp("load") / "operator") as world:
            world.folder.write_site("wels", SiteRecord(state="registered", node="11"))
            yield world


@pytest.fixture
def world(served: World) -> World:
    served.reached.clear()
    served.answers.clear()
    assert served.gateway is not None
    served.gateway.seen.clear()
    return served


def open_plain(world: World, held: ExitStack) -> socket.socket:
    return held.enter_context(socket.create_connection(("127.0.0.1", world.port), 20))


def open_secure(world: World, held: ExitStack) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=world.authority)
    plain = open_plain(world, held)
    return held.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))


def begin(world: World, held: ExitStack, path: str, size: int, key: str = "graz") -> ssl.SSLSocket:
    """A connection on which a request has begun whose body is still to come."""
    there = open_secure(world, held)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n".encode()
    there.sendall(head + world.signed(key) + b"\r\n")
    return there


def read_status(there: ssl.SSLSocket) -> bytes:
    return there.recv(4096).split(b" ")[1]


def is_over(there: socket.socket) -> bool:
    """Wait until the gateway has ended a connection. Raises TimeoutError."""
    try:
        return there.recv(4096) == b""
    except (ConnectionError, ssl.SSLError):
        return True


def until(found: Callable[[], bool]) -> None:
    for _ in range(1000):
        if found():
            return
        time.sleep(0.02)
    raise AssertionError("did not come")


def count_taken(world: World, site: str) -> int:
    assert world.gateway is not None
    return world.gateway._room._bytes[site]


def test_many_big_bodies_of_one_site_hold_up_no_other_and_pass_when_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "TOTAL", 8 * MIB)
    body = b"x" * (2 * MIB)
    with ExitStack() as held:
        first, second = (begin(world, held, OBJECT, len(body)) for _ in range(2))
        until(lambda: count_taken(world, "graz") == 4 * MIB)
        assert world.post(OBJECT, content=body).status_code == 503
        # by what it says, before it comes; and in chunks, without saying it
        assert read_status(begin(world, held, OBJECT, len(body))) == b"503"
        chunks = open_secure(world, held)
        chunks.sendall(f"POST {OBJECT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n".encode())
        chunks.sendall(world.signed() + b"\r\n1\r\nx\r\n")
        assert read_status(chunks) == b"503"
        assert world.post(OBJECT, "wels", content=body).content == b"answer"
        assert world.post(OBJECT, "wels", content=b"x" * (3 * MIB)).status_code == 503
        assert world.post(BEAT, "wels").content == b"answer"
        world.answers += [Response(b"x" * (3 * MIB))]
        assert world.post(FETCH, "wels").status_code == 503
        for there in (first, second):
            there.sendall(body)
            assert read_status(there) == b"200"
        assert world.post(OBJECT, content=body).content == b"answer"
    assert [len(there[2]) for there in world.reached if there[1] == OBJECT] == 4 * [2 * MIB]
    until(lambda: count_taken(world, "graz") == count_taken(world, "wels") == 0)


def test_the_largest_object_fits_into_an_empty_gateway() -> None:
    largest = max(FLEET.values())
    assert 300 * MIB < largest <= traffic.TOTAL // 2 and largest <= gateway.REPLY_BYTES


def test_one_site_has_only_so_many_requests_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "REQUESTS", 2)
    with ExitStack() as held:
        there = [begin(world, held, BEAT, 5) for _ in range(2)]
        until(lambda: count_taken(world, "graz") == 10)
        assert world.post(BEAT).status_code == 503
        assert world.post(BEAT, "wels").content == b"answer"
        there[0].sendall(b"hello")
        assert read_status(there[0]) == b"200"
        until(lambda: world.post(BEAT).status_code == 200)


def test_a_body_that_trickles_is_refused_and_a_slow_one_passes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "GRACE", 1.0)
    monkeypatch.setattr(traffic, "RATE", 20)
    with ExitStack() as held:
        trickling, slow = begin(world, held, OBJECT, 2000), begin(world, held, OBJECT, 2000, "wels")
        trickling.sendall(b"x")
        for _ in range(10):  # longer than GRACE, each time with 10 s more to go
            slow.sendall(b"x" * 200)
            time.sleep(0.15)
        assert read_status(slow) == b"200"
        assert read_status(trickling) == b"503"
    assert [len(body) for _, _, body in world.reached] == [2000]


def test_an_answer_that_is_not_read_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "GRACE", 0.5)
    monkeypatch.setattr(traffic, "RATE", 32 * MIB)
    size = 32 * MIB
    world.answers += [Response(b"x" * size)]
    with ExitStack() as held:
        there = begin(world, held, FETCH, 0)
        until(lambda: count_taken(world, "graz") == size)
        until(lambda: count_taken(world, "graz") == 0)
        read = 0
        try:
            while part := there.recv(MIB):
                read += len(part)
        except (ConnectionError, ssl.SSLError):
            pass
        assert read < size
    monkeypatch.setattr(traffic, "GRACE", 30.0)
    world.answers += [Response(b"x" * size)]
    assert len(world.post(FETCH).content) == size


def test_connections_that_do_not_say_whole_headers_end(world: World) -> None:
    with ExitStack() as held:
        bare, silent, half, dead = open_plain(world, held), *(open_secure(world, held) for _ in range(3))
        dead.sendall(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n")
        assert read_status(dead) == b"404"
        began = time.monotonic()
        over: list[float] = []

        def trickle(there: ssl.SSLSocket) -> None:
            """Say a byte of a header, or of a body that nobody reads, again and again."""
            while time.monotonic() < began + 20:
                try:
                    there.sendall(b"x")
                except OSError:
                    over.append(time.monotonic())
                    return
                time.sleep(0.1)

        half.sendall(b"POST /x HTTP/1.1\r\nx: ")
        threads = [threading.Thread(target=trickle, args=(there,)) for there in (half, dead)]
        for thread in threads:
            thread.start()
        assert world.post(BEAT).content == b"answer"
        assert is_over(bare) and is_over(silent)
        for thread in threads:
            thread.join(30)
        assert len(over) == 2


def test_silent_connections_give_way_and_served_ones_do_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "PATIENCE", 60.0)
    with ExitStack() as held:
        waiting = begin(world, held, OBJECT, 5)
        until(lambda: count_taken(world, "graz") == 5)
        silent = []
        for number in range(3 * PLACES):
            silent.append(open_secure(world, held))
            if number % PLACES == 0:
                assert world.post(BEAT).content == b"answer"
        assert all(is_over(there) for there in silent[:PLACES])
        waiting.sendall(b"hello")
        assert read_status(waiting) == b"200"


def test_a_site_sends_replies_of_its_own_and_no_messages(world: World) -> None:
    own = make_reply()
    others = [
        make_reply(answers=""),  # the server's message to a site, if its sender is node 1
        make_reply(1, answers=""),
        make_reply(1),
        make_reply(11),
        make_reply(root="other"),
        own + own,
        own + make_reply(1, answers=""),
        b"",
        b"\xff",
        b"asked",
    ]
    for content in others:
        assert world.post(REPLY, content=content).status_code == 400
    assert not world.reached
    assert world.post(REPLY, content=own).content == b"answer"


def test_a_field_that_others_read_otherwise_makes_no_reply(world: World) -> None:
    from perennial.deploy.control import encode_fields as encode

    def push(*facts: tuple[int, int | str]) -> bytes:
        return encode((2, encode((1, encode((2, "reply"), *facts)))), (3, encode((1, "reply"))))

    node, answered = (3, int(NODE)), (5, "question")
    assert world.post(REPLY, content=push(node, answered)).content == b"answer"
    for facts in ((node, (5, 1)), (node, answered, (5, "")), (node, (3, 1), answered), (node,)):
        assert world.post(REPLY, content=push(*facts)).status_code == 400


def test_what_is_stored_for_one_message_has_an_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.gateway is not None
    monkeypatch.setattr(gateway, "REPLY_BYTES", 1000)
    monkeypatch.setattr(gateway, "REPLY_TREES", 2)
    world.gateway.seen[NODE] = Seen(bytes=1000, trees=2)
    world.answers += [Response(b""), *(Response(b"stored") for _ in range(2))]
    for _ in range(3):  # Flower stored two of them
        assert world.post(OBJECT, content=b"x" * 400).status_code == 200
    assert world.post(OBJECT, content=b"x" * 400).status_code == 413
    assert [world.post(REPLY, content=make_reply()).status_code for _ in range(3)] == [200, 200, 413]
    assert world.post(PULL).content == b"answer", "a message, which allows one more reply"
    assert world.post(OBJECT, content=b"x" * 1000).status_code == 200
    assert world.post(REPLY, content=make_reply()).status_code == 200
    for _ in range(9):
        world.post(PULL)
    assert world.gateway.seen[NODE].bytes == 4000, "nobody saves up for one large reply"
