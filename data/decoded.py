"""Decoded pixels kept on the site's own disk.

A deployed site answers each message in a fresh process; decoding a folder of photographs again every time
would cost more than training on them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from perennial.data.images import ImageReading, ImagesRead
from perennial.foundation.files import make_folder, replace_file

_LAYOUT = 2


def decoded(
    cache: Path | None,
    paths: Sequence[Path],
    reading: ImageReading,
    decode: Callable[[Sequence[Path], ImageReading], ImagesRead],
) -> ImagesRead:
    """decode(paths, reading), or what it returned last time for the same files and the same reading.

    cache: a private folder, one file in it; None decodes always. A file counts as the same while its path,
    its length and its time of change are. A damaged cache is decoded anew.
    """
    if cache is None:
        return decode(paths, reading)
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    fingerprint = _fingerprint(paths, reading)
    path = cache / "images.safetensors"
    if fingerprint is not None and path.exists():
        try:
            arrays = load(path.read_bytes())
        except SafetensorError:
            arrays = {}
        if arrays.keys() >= {"x", "rows", "notes"} and arrays["key"].tobytes() == fingerprint:
            return ImagesRead(arrays["x"], arrays["rows"], tuple(json.loads(arrays["notes"].tobytes())))
    found = decode(paths, reading)
    if fingerprint is not None:
        make_folder(cache)
        key, notes = (
            np.frombuffer(text, dtype=np.uint8) for text in (fingerprint, json.dumps(found.notes).encode())
        )
        replace_file(path, save({"key": key, "x": found.x, "rows": found.rows, "notes": notes}))
    return found


def _fingerprint(paths: Sequence[Path], reading: ImageReading) -> bytes | None:
    """None where a file is missing or cannot be one, which decoding will report by name."""
    try:
        states = [path.stat() for path in paths]
    except (OSError, ValueError):
        return None
    files = [[str(path), state.st_size, state.st_mtime_ns] for path, state in zip(paths, states, strict=True)]
    return hashlib.sha256(json.dumps([_LAYOUT, repr(reading), files]).encode()).digest()
