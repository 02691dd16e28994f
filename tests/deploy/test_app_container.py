"""A SuperNode and what runs its apps, in two containers: joined by sockets, and each ends with the other."""

import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import pytest

from perennial.deploy.app_container import Half, Partner
from perennial.deploy.supernode import start_supernode
from perennial.foundation.errors import StateError
from tests.loopback import free_ports


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it was sent, once the sender has finished."""

    def answer(arrived: socket.socket) -> None:
        with arrived:
            data = bytearray()
            while part := arrived.recv(4096):
                data += part
            arrived.sendall(data)

    def serve() -> None:
        while True:
            Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def ask(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as there:
        Thread(target=lambda: (there.sendall(data), there.shutdown(socket.SHUT_WR)), daemon=True).start()
        found = bytearray()
        while part := there.recv(65536):
            found += part
        return bytes(found)


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def _hold(folder: Path, port: int, joins: bool) -> None:
    (Partner.join if joins else Partner.let_in)(folder, port)
    time.sleep(600)


def test_a_port_of_one_side_is_reached_on_the_other(tmp_path: Path, echo: int) -> None:
    (port,) = free_ports(1)
    apps = Thread(target=Partner.join, args=(tmp_path, port), daemon=True)
    apps.start()  # before the other side is there
    time.sleep(0.3)
    Partner.let_in(tmp_path, echo)
    apps.join(20)
    large = bytes(range(256)) * 8192
    assert ask(port, large) == large
    assert {ask(port, f"{number}".encode()) for number in range(5)} == {b"0", b"1", b"2", b"3", b"4"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir()), "others may connect"


def test_the_apps_side_waits_until_the_port_serves(tmp_path: Path) -> None:
    """It would end at a connection that is accepted and relayed to nobody, and its partner with it."""
    there, here = free_ports(2)
    apps = Thread(target=Partner.join, args=(tmp_path, here), daemon=True)
    apps.start()
    Partner.let_in(tmp_path, there)
    apps.join(1)
    assert apps.is_alive()
    with socket.create_server(("127.0.0.1", there)):
        apps.join(20)
        assert not apps.is_alive()


@pytest.mark.parametrize("killed", ["keys", "app"])
def test_each_side_learns_that_the_other_was_killed(tmp_path: Path, echo: int, killed: str) -> None:
    (port,) = free_ports(1)
    other = get_context("spawn").Process(
        target=_hold, args=(tmp_path, port if killed == "app" else echo, killed == "app"), daemon=True
    )
    other.start()
    mine = Partner.let_in(tmp_path, echo) if killed == "app" else Partner.join(tmp_path, port)
    if killed == "app":
        wait(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    assert ask(port, b"hello") == b"hello"
    assert not mine.gone
    other.kill()
    wait(lambda: mine.gone)


def test_apps_do_not_start_where_the_key_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(
        "site: graz\nstate_dir: state\nconnection: {superlink: 'localhost:9092'}\n"
    )
    (tmp_path / "node.key").write_bytes(b"a key")
    with pytest.raises(StateError, match=r"node\.key: can be read where apps run"):
        start_supernode(tmp_path / "site.yaml", Half.APP)
