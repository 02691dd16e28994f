"""Which records of a site are the same, over files, runs, experiments and restarts: a keyed hash of content.

The content of a record is what was decoded: its shape and pixels, or its parsed feature columns by name.
Label, path, part and experiment are no part of it. The key (foundation/record_key.py) lies in the site's
state_dir and never leaves, so that an identity says nothing to anybody else: without the key nobody can tell
whether a record that he has is among them.

A file that was encoded anew has other pixels, and so another identity. A place (a path, or a row of a file)
that was known before passes on what its former record was charged (privacy/record_book.py).
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from perennial.data.splits import DIGEST_BYTES
from perennial.data.table_columns import feature_ranges

IDENTITY_BYTES = 16
Columns = Mapping[str, str | Sequence[str]]


def record_contents(x: Tensor, columns: Columns | None = None) -> np.ndarray:
    """(N, 32) uint8: SHA-256 of each record's decoded content, without a key; it must not leave as it is.

    x: (N, C, H, W) pixels or (N, D) values, before anything that depends on other records is done to them.
    columns: of a table, feature column -> its kind or its categories, in the order of x; None: no table.
    """
    head = f"{x.dtype} {tuple(x.shape[1:])}"
    if columns is not None:
        names, places = sorted(columns), feature_ranges(columns)
        head = repr([(name, columns[name]) for name in names])
        x = x[:, [place for name in names for place in places[name]]]
    rows = x.cpu().contiguous().flatten(1).numpy()
    found = np.empty((len(rows), DIGEST_BYTES), dtype=np.uint8)
    for row, content in enumerate(rows):
        digest = hashlib.sha256(f"record:{head}:".encode())
        digest.update(content.data)
        found[row] = np.frombuffer(digest.digest(), dtype=np.uint8)
    return found


def identities(key: bytes, purpose: str, contents: Iterable[bytes]) -> np.ndarray:
    """(N, 16) uint8: HMAC-SHA256 of each content under the site's key, cut to 16 bytes.

    purpose: of the hash; two purposes have nothing in common.
    """
    label = f"{purpose}:".encode()
    found = [hmac.digest(key, label + content, "sha256")[:IDENTITY_BYTES] for content in contents]
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, IDENTITY_BYTES)
