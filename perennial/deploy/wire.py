"""Two protocol buffers of Flower that the gateway reads or writes, by the numbers of their fields."""

from collections.abc import Iterator
from typing import Any

from perennial.deploy.run_book import FlowerRun


def listed_runs(data: bytes) -> dict[str, FlowerRun]:
    """Runs by id in the Control API's answer to list-runs (ListRunsResponse of Flower's control.proto)."""
    found: dict[str, FlowerRun] = {}
    for number, entry in _fields(data):
        if number != 1:
            continue
        run: dict[int, Any] = {}
        settings: dict[str, str] = {}
        for field, value in _fields(dict(_fields(entry))[2]):
            if field == 4:  # override_config, a map of text to Scalar, of which 14 is text
                pair = dict(_fields(value))
                settings[pair[1].decode()] = dict(_fields(pair.get(2, b""))).get(14, b"").decode()
            else:
                run[field] = value
        status = dict(_fields(run.get(10, b"")))
        words = [status[part].decode() for part in (1, 2) if status.get(part)]
        found[str(run[1])] = FlowerRun(":".join(words), run.get(5, b"").decode(), settings.get("name", ""))
    return dict(sorted(found.items(), key=lambda item: item[0]))


def node_body(node: int) -> bytes:
    """Flower's DeactivateNodeRequest: its first field is the node's id."""
    body = bytearray(b"\x08")
    while node > 127:
        body.append(node & 127 | 128)
        node >>= 7
    return bytes([*body, node])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
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
