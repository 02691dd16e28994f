"""The SuperLink's Control API, asked by HTTP, since Flower's own command takes seconds to start.

Requests and answers are protocol buffers, written and read by the numbers of their fields in Flower's
control.proto and fleet.proto. The API listens on the loopback of the SuperLink's machine or container alone.
"""

import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

from perennial.deploy.certificates import pem
from perennial.deploy.federation import IN_CONTAINER, OperatorFolder
from perennial.deploy.run_book import FlowerRun
from perennial.foundation.errors import StateError, shown

PROTOBUF = "application/protobuf"
SECONDS = 60


def list_runs(folder: OperatorFolder) -> dict[str, FlowerRun]:
    """Flower's runs by id. Raises StateError, as all of these do, when the SuperLink does not answer."""
    return listed_runs(_answer(folder, "list-runs"))


def start_run(folder: OperatorFolder, fab: bytes, digest: str, settings: Mapping[str, str]) -> str:
    """Start a run of an app and return Flower's id of it. settings: override the app's run config."""
    config = [(2, encoded((1, key), (2, encoded((14, value))))) for key, value in settings.items()]
    reply = _answer(folder, "start-run", (1, encoded((1, digest), (2, fab))), *config)
    started = dict(fields(reply)).get(1)
    if not started:
        raise StateError(f"the SuperLink took no run of app {digest[:8]}; see its log")
    return str(started)


def stop_run(folder: OperatorFolder, run: str) -> None:
    """Stop one of Flower's runs."""
    _answer(folder, "stop-run", (1, int(run)))


def register_node(folder: OperatorFolder, name: str) -> str:
    """Register a site's public key and return the id of its node."""
    reply = _answer(folder, "register-node", (1, pem(folder.public_key(name))), (3, name))
    return str(dict(fields(reply))[1])


def unregister_node(folder: OperatorFolder, node: str) -> None:
    """Shut a node out for good."""
    _answer(folder, "unregister-node", (1, int(node)))


def logged(folder: OperatorFolder, run: str, *, follow: bool) -> Iterator[str]:
    """Yield what a run's ServerApp has logged, and with follow, what it will until it is over."""
    with _asked(folder, "stream-logs", encoded((1, int(run)))) as reply:
        while len(size := reply.read(4)) == 4:
            parts = dict(fields(reply.read(int.from_bytes(size))))
            yield parts.get(1, b"").decode(errors="replace")
            if not follow:
                return


def _answer(folder: OperatorFolder, call: str, *request: tuple[int, int | str | bytes]) -> bytes:
    with _asked(folder, call, encoded(*request)) as reply:
        return reply.read()


def _asked(folder: OperatorFolder, call: str, body: bytes) -> AbstractContextManager[IO[bytes]]:
    """The answer to one call, to be read as it comes."""
    if folder.federation.runtime == "compose" and folder.path != IN_CONTAINER:
        return _asked_in_container(folder, call, body)
    url = f"https://127.0.0.1:{folder.federation.control_port}/v1/control/{call}"
    request = urllib.request.Request(url, body, {"Content-Type": PROTOBUF}, method="POST")
    context = ssl.create_default_context(cafile=folder.certificates / "ca.crt")
    # loopback is asked by no proxy
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        return opener.open(request, timeout=None if call == "stream-logs" else SECONDS)
    except urllib.error.HTTPError as refusal:
        said = shown(refusal.read(4096).decode(errors="replace"), 600)
        raise StateError(f"the SuperLink refuses {call}: {said}") from None
    except OSError as error:
        port = folder.federation.control_port
        raise StateError(
            f"the SuperLink does not answer {call} at port {port} ({error}); does it run?"
        ) from error


@contextmanager
def _asked_in_container(folder: OperatorFolder, call: str, body: bytes) -> Iterator[IO[bytes]]:
    """As _asked(), by this module in the SuperLink's container."""
    command = ["docker", "compose", "--project-directory", str(folder.path), "exec", "-T", "superlink"]
    command += ["python", "-m", "perennial.deploy.control", call]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process:
        with process.stdin:
            process.stdin.write(body)
        yield process.stdout
        process.stdout.close()
        said = process.stderr.read().decode(errors="replace")
        if process.wait() and call != "stream-logs":
            raise StateError(shown(said.strip(), 600) or f"{call}: failed in the SuperLink's container")


def listed_runs(data: bytes) -> dict[str, FlowerRun]:
    """Runs by id in a ListRunsResponse."""
    found: dict[str, FlowerRun] = {}
    for number, entry in fields(data):
        if number != 1:
            continue
        run: dict[int, Any] = {}
        settings: dict[str, str] = {}
        for field, value in fields(dict(fields(entry))[2]):
            if field == 4:  # override_config, a map of text to Scalar, of which 14 is text
                pair = dict(fields(value))
                settings[pair[1].decode()] = dict(fields(pair.get(2, b""))).get(14, b"").decode()
            else:
                run[field] = value
        status = dict(fields(run.get(10, b"")))
        words = [status[part].decode() for part in (1, 2) if status.get(part)]
        found[str(run[1])] = FlowerRun(":".join(words), run.get(5, b"").decode(), settings.get("name", ""))
    return dict(sorted(found.items(), key=lambda item: item[0]))


def encoded(*parts: tuple[int, int | str | bytes]) -> bytes:
    """A protocol buffer of these fields, each its number and value."""
    data = b""
    for number, value in parts:
        if isinstance(value, int):
            data += _varint(number << 3) + _varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += _varint(number << 3 | 2) + _varint(len(content)) + content
    return data


def _varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer: an int, or bytes. Raises ValueError."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            if place >= len(data) or shift > 63:
                raise ValueError("not a protocol buffer")
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        elif kind in (1, 2, 5):
            size = varint() if kind == 2 else 8 if kind == 1 else 4
            if place + size > len(data):
                raise ValueError("not a protocol buffer")
            yield number, data[place : place + size]
            place += size
        else:
            raise ValueError("not a protocol buffer")


if __name__ == "__main__":
    with _asked(OperatorFolder(IN_CONTAINER), sys.argv[1], sys.stdin.buffer.read()) as answered:
        while chunk := answered.read1(2**16):  # type: ignore[attr-defined]  # pyright: ignore
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
