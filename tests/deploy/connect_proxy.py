"""An HTTP proxy of a hospital: it knows CONNECT, and nothing else."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ConnectProxy:
    """asked: HOST:PORT of each CONNECT. instead: where it connects, whatever was asked, as for opened TLS."""

    def __init__(self, instead: tuple[str, int] | None = None) -> None:
        self.asked: list[str] = []
        self._instead = instead
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._tunnel, args=(near,), daemon=True).start()

    def _tunnel(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += near.recv(4096)
            address = head.split(b" ")[1].decode()
            self.asked.append(address)
            host, _, port = address.rpartition(":")
            with socket.create_connection(self._instead or (host, int(port))) as far:
                near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def connect_proxy(instead: tuple[str, int] | None = None) -> Iterator[ConnectProxy]:
    proxy = ConnectProxy(instead)
    threading.Thread(target=proxy.serve, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()
