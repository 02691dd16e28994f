"""Files cut into parts of a size that can be carried, and put together again.

A part is a folder: `bytes`, a stretch of all files one after the other, and `part.json`, which says what all
parts are. The standard library alone: a bare machine reads parts before anything is installed there.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

BYTES, FACTS = "bytes", "part.json"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Stored:
    """One file inside the parts. name: relative to the folder, with slashes."""

    name: str
    size: int
    sha256: str


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cut(folder: Path, out: Path, size: int) -> list[Path]:
    """Write all files of folder as parts of at most `size` bytes below out; returns the parts' folders.

    Parts of an earlier cut are removed. Raises ValueError for an empty folder or a size below 1.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths or size < 1:
        raise ValueError(f"{folder}: found {len(paths)} files and parts of {size} bytes, allowed 1 or more")
    files = [Stored(p.relative_to(folder).as_posix(), p.stat().st_size, sha256_of(p)) for p in paths]
    total = sum(file.size for file in files)
    count = max(1, -(-total // size))
    for old in out.glob("part-*"):
        shutil.rmtree(old)
    parts, chunks = [], _chunks(paths)
    rest = b""
    for number in range(count):
        part = out / f"part-{number:02d}"
        part.mkdir(parents=True)
        with (part / BYTES).open("wb") as file:
            rest = _fill(file, rest, chunks, size)
        facts = {
            "number": number,
            "count": count,
            "sha256": sha256_of(part / BYTES),
            "files": [vars(stored) for stored in files],
        }
        (part / FACTS).write_text(json.dumps(facts))
        parts.append(part)
    return parts


def receive(part: Path, store: Path) -> list[int]:
    """Keep a part in store, and put all files together once the last one is there.

    Returns the numbers of the parts that are missing still. A part of other files begins anew. Raises
    ValueError where bytes arrived damaged; the store is then as it was.
    """
    facts = _facts(part)
    if sha256_of(part / BYTES) != facts["sha256"]:
        raise ValueError(f"{part}: its bytes are not those that were packed; carry it again")
    kept = store / "parts"
    if kept.exists() and any(_facts(other)["files"] != facts["files"] for other in kept.iterdir()):
        shutil.rmtree(kept)
    place = kept / part.name
    arriving = store / "arriving"
    for old in (arriving, place):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(part, arriving)
    kept.mkdir(parents=True, exist_ok=True)
    arriving.rename(place)
    there = {_facts(other)["number"] for other in kept.iterdir()}
    missing = [number for number in range(facts["count"]) if number not in there]
    if not missing:
        _join(sorted(kept.iterdir()), [Stored(**file) for file in facts["files"]], store)
        shutil.rmtree(kept)
    return missing


def _facts(part: Path) -> dict[str, Any]:
    return json.loads((part / FACTS).read_text())


def _chunks(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _fill(file: BinaryIO, rest: bytes, chunks: Iterator[bytes], size: int) -> bytes:
    """Write up to size bytes; returns what was read and is for the next part."""
    written = 0
    while written < size:
        rest = rest or next(chunks, b"")
        if not rest:
            break
        now, rest = rest[: size - written], rest[size - written :]
        written += file.write(now)
    return rest


def _join(parts: list[Path], files: list[Stored], store: Path) -> None:
    stream = _chunks([part / BYTES for part in parts])
    rest = b""
    for stored in files:
        path = (store / stored.name).resolve()
        if not path.is_relative_to(store.resolve()):
            raise ValueError(f"{stored.name}: lies outside the store")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            rest = _fill(file, rest, stream, stored.size)
        if sha256_of(path) != stored.sha256:
            raise ValueError(f"{path}: is not the file that was packed")
