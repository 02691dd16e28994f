"""The SuperLink's Control API, and which of its runs belong to which submitted experiment.

It is asked by HTTP, since Flower's own command takes seconds to start. Requests and answers are protocol
buffers, written and read by the numbers of their fields in Flower's control.proto and fleet.proto. The API
listens on the loopback of the SuperLink's machine or container alone.

An answer may be lost. So before a run is asked for, its name and the hash of its app are on the disk
(apps/NAME.runs.json). A run of Flower's that has this hash and name, and that no file has, is then adopted.
Any other one is unknown here.
"""

import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from perennial.deploy.certificates import convert_to_pem
from perennial.deploy.federation import IN_CONTAINER, OperatorFolder
from perennial.foundation.errors import StateError, clean_text
from perennial.foundation.files import replace_file

PROTOBUF = "application/protobuf"
SECONDS = 60
SUFFIX = ".runs.json"


@dataclass(frozen=True)
class FlowerRun:
    """A run as Flower lists it.

    status: such as `running` or `finished:failed`. bundle: SHA-256 of its app. name: that Perennial gave it;
    '' where Flower's list does not say.
    """

    status: str
    bundle: str = ""
    name: str = ""

    @property
    def over(self) -> bool:
        return self.status.startswith("finished")


def list_runs(folder: OperatorFolder) -> dict[str, FlowerRun]:
    """Flower's runs by id. Raises StateError, as all of these do, when the SuperLink does not answer."""
    return parse_runs(_answer(folder, "list-runs"))


def start_run(folder: OperatorFolder, fab: bytes, digest: str, settings: Mapping[str, str]) -> str:
    """Start a run of an app and return Flower's id of it. settings: override the app's run config."""
    config = [
        (2, encode_fields((1, key), (2, encode_fields((14, value))))) for key, value in settings.items()
    ]
    reply = _answer(folder, "start-run", (1, encode_fields((1, digest), (2, fab))), *config)
    started = dict(decode_fields(reply)).get(1)
    if not started:
        raise StateError(f"the SuperLink took no run of app {digest[:8]}; see its log")
    return str(started)


def stop_run(folder: OperatorFolder, run: str) -> None:
    """Stop one of Flower's runs."""
    _answer(folder, "stop-run", (1, int(run)))


def register_node(folder: OperatorFolder, name: str) -> str:
    """Register a site's public key, unless it is registered already; returns the id of its node."""
    key = convert_to_pem(folder.locate_public_key(name))
    if (known := _list_nodes(folder).get(key)) is not None:
        return known
    return str(dict(decode_fields(_answer(folder, "register-node", (1, key), (3, name))))[1])


def unregister_node(folder: OperatorFolder, node: str) -> None:
    """Shut a node out for good, unless it is out already."""
    if node in _list_nodes(folder).values():
        _answer(folder, "unregister-node", (1, int(node)))


def _list_nodes(folder: OperatorFolder) -> dict[bytes, str]:
    """The id of each node that Flower lets in, by its public key (PEM)."""
    entries = [value for number, value in decode_fields(_answer(folder, "list-nodes")) if number == 1]
    nodes = [dict(decode_fields(entry)) for entry in entries]
    return {node[11]: str(node[1]) for node in nodes if node[4] != b"unregistered"}


def stream_log(folder: OperatorFolder, run: str, *, follow: bool) -> Iterator[str]:
    """Yield what a run's ServerApp has logged, and with follow, what it will until it is over."""
    with _call(folder, "stream-logs", encode_fields((1, int(run)))) as reply:
        while len(size := reply.read(4)) == 4:
            parts = dict(decode_fields(reply.read(int.from_bytes(size))))
            yield parts.get(1, b"").decode(errors="replace")
            if not follow:
                return


def _answer(folder: OperatorFolder, call: str, *request: tuple[int, int | str | bytes]) -> bytes:
    with _call(folder, call, encode_fields(*request)) as reply:
        return reply.read()


def _call(folder: OperatorFolder, call: str, body: bytes) -> AbstractContextManager[IO[bytes]]:
    """The answer to one call, to be read as it comes."""
    if folder.federation.runtime == "compose" and folder.path != IN_CONTAINER:
        return _call_in_container(folder, call, body)
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
        said = clean_text(refusal.read(4096).decode(errors="replace"), 600)
        raise StateError(f"the SuperLink refuses {call}: {said}") from None
    except OSError as error:
        port = folder.federation.control_port
        raise StateError(
            f"the SuperLink does not answer {call} at port {port} ({error}); does it run?"
        ) from error


@contextmanager
def _call_in_container(folder: OperatorFolder, call: str, body: bytes) -> Iterator[IO[bytes]]:
    """As _asked(), by this module in the SuperLink's container."""
    command = ["docker", "compose", "--project-directory", str(folder.path), "exec", "-T", "superlink"]
    command += ["python", "-m", "perennial.deploy.control", call]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            process.stdin.write(body)
        yield process.stdout
    # it has said why
    if process.returncode and call != "stream-logs":
        raise StateError(f"{call}: failed in the SuperLink's container")


def parse_runs(data: bytes) -> dict[str, FlowerRun]:
    """Runs by id in a ListRunsResponse. Raises ValueError where it is none."""
    found: dict[str, FlowerRun] = {}
    for number, entry in decode_fields(data):
        if number != 1:
            continue
        run = decode_fields(dict(decode_fields(entry))[2])
        facts = dict(run)
        settings = dict[bytes, bytes]()
        for pair in (dict(decode_fields(value)) for number, value in run if number == 4):
            # override_config, a map of text to Scalar, of which 14 is text
            settings[pair[1]] = dict(decode_fields(pair.get(2, b""))).get(14, b"")
        status = dict(decode_fields(facts.get(10, b"")))
        words = ":".join(status[part].decode() for part in (1, 2) if status.get(part))
        name = settings.get(b"name", b"").decode()
        found[str(facts[1])] = FlowerRun(words, facts.get(5, b"").decode(), name)
    return dict(sorted(found.items()))


def encode_fields(*parts: tuple[int, int | str | bytes]) -> bytes:
    """A protocol buffer of these fields, each its number and value."""
    data = b""
    for number, value in parts:
        if isinstance(value, int):
            data += _encode_varint(number << 3) + _encode_varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += _encode_varint(number << 3 | 2) + _encode_varint(len(content)) + content
    return data


def _encode_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _encode_varint(value >> 7)


def decode_fields(data: bytes) -> list[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer: an int, or bytes. Raises ValueError."""
    message = Empty()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError("not a protocol buffer") from error
    return [(field.field_number, field.data) for field in UnknownFieldSet(message)]


def decode_once(data: bytes) -> dict[int, Any]:
    """The fields by number. Raises ValueError where one stands twice: Flower may take the other one."""
    fields = decode_fields(data)
    if len(fields) != len(dict(fields)):
        raise ValueError("a field stands twice")
    return dict(fields)


class RunBook:
    """The record of starts in the operator's folder of apps."""

    def __init__(self, apps: Path) -> None:
        self._apps = apps

    def names(self) -> list[str]:
        """Names of all experiments that were ever asked to run."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._apps.glob(f"*{SUFFIX}"))

    def path(self, name: str) -> Path:
        """The file of one name; its time is that of the last command that started or stopped a run."""
        return self._apps / f"{name}{SUFFIX}"

    def list_recorded(self, name: str) -> list[str]:
        """Flower's ids of the starts whose answer arrived, or that were adopted; oldest first."""
        return self._read(name)[1]

    def note(self, name: str, *runs: str, bundle: str = "") -> None:
        """Add Flower's ids of starts, or only note that a run was changed just now.

        bundle: SHA-256 of the app of a run that is wanted, noted before Flower is asked.
        """
        noted, known = self._read(name)
        content = {"bundle": bundle or noted, "runs": list(dict.fromkeys((*known, *runs)))}
        replace_file(self.path(name), json.dumps(content).encode(), mode=0o644)

    def find_owners(self, runs: Mapping[str, FlowerRun]) -> dict[str, list[str]]:
        """Flower's ids by name, oldest first, with those that are adopted from Flower's list `runs`."""
        found = {name: self.list_recorded(name) for name in self.names()}
        taken = {run for ids in found.values() for run in ids}
        for run, facts in runs.items():
            if run not in taken and facts.bundle:
                named = [name for name in found if facts.name in ("", name)]
                for name in [name for name in named if self._read(name)[0] == facts.bundle][:1]:
                    found[name].append(run)
        return found

    def find_unknown(self, runs: Mapping[str, FlowerRun]) -> dict[str, str]:
        """Status by id of every run of Flower's that goes on and belongs to no name."""
        taken = {run for ids in self.find_owners(runs).values() for run in ids}
        return {run: facts.status for run, facts in runs.items() if run not in taken and not facts.over}

    def _read(self, name: str) -> tuple[str, list[str]]:
        """(SHA-256 of the app or '', ids). 0.2.0 wrote a list of ids alone."""
        path = self.path(name)
        if not path.is_file():
            return "", []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return str(content["bundle"]), [str(run) for run in content["runs"]]
            return "", [str(run) for run in content]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{path}: no record of a run's starts ({error}); remove it") from error


if __name__ == "__main__":
    try:
        with _call(OperatorFolder(IN_CONTAINER), sys.argv[1], sys.stdin.buffer.read()) as answered:
            while chunk := answered.read1(2**16):  # type: ignore[attr-defined]  # pyright: ignore
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
    except StateError as error:
        sys.exit(str(error))
