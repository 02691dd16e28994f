"""safetensors files whose bytes follow from their content alone."""

import json
import struct

LENGTH = struct.Struct("<Q")
"""A safetensors file begins with the length of its header, a JSON object."""
ALIGNMENT = 8
METADATA = "__metadata__"


def with_sorted_metadata(data: bytes) -> bytes:
    """The same safetensors file with its metadata in alphabetical order.

    The library writes metadata in the order of a hash table, which differs from process to process, so that
    two files of one model would have different hashes.
    """
    (length,) = LENGTH.unpack_from(data)
    start = LENGTH.size + length
    header = json.loads(data[LENGTH.size : start])
    if METADATA in header:
        header[METADATA] = dict(sorted(header[METADATA].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return b"".join((LENGTH.pack(len(text)), text, memoryview(data)[start:]))
