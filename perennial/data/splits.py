"""Which records are held out, capped or kept: decided for each record by a keyed hash of that record alone.

The hash is HMAC-SHA256 over a purpose and the record's group: its patient where the data names patients, else
its raw content, without the label. Read as a 64-bit integer it is below share x 2^64 or not. Adding or
removing a record therefore moves no other one, and records with one content, or of one patient, go the same
way. Shares are met on average and not exactly, and nothing is stratified: a class can be left
without a test sample.

The key of a simulation follows from the experiment's seed. Sites with data of their own get the run's key,
which the server draws once their data are fixed: nobody can make records that fall into a part of his choice.

Records of a site are the same, over files, runs, experiments and restarts, if what was decoded is: shape and
pixels, or parsed columns by name, under the key of the site's state_dir (foundation/record_key.py), which
never leaves. A file that was encoded anew has other pixels, and so another identity.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import DataError

Purpose = Literal["test", "validation", "samples-limit", "test-limit", "exemplars", "counts", "calibration"]
"""What a hash decides. Two purposes never share one, so that neither choice says anything of the other."""

KEY_BYTES = 32
DIGEST_BYTES = 32
_RANGE = 2**64


def derive_simulation_key(seed: int) -> bytes:
    """(32 bytes) The key of a simulation, by which its run repeats. Whoever has the seed has it too."""
    return hashlib.sha256(f"perennial: key of simulated splits, seed {seed}".encode()).digest()


def group_by_content(x: Tensor) -> np.ndarray:
    """(N, 32) uint8: a group for each sample from its raw bytes, equal for samples of equal content.

    x: (N, ...) as a source gave it, before anything that depends on other samples is done to it.
    """
    rows = x.cpu().contiguous().reshape(len(x), -1).numpy()
    return _hash_contents("content", (row.data for row in rows), len(rows))


def group_by_text(kind: Literal["content", "patient"], texts: Sequence[str]) -> np.ndarray:
    """(N, 32) uint8: the group of each text, which is a table's row ("content") or a patient's name."""
    return _hash_contents(kind, (text.encode() for text in texts), len(texts))


def group_by_patient(
    names: Sequence[str], where: Callable[[int], str], missing: Sequence[str] = ("",)
) -> np.ndarray:
    """(N, 32) uint8: the group of each sample, the same for all samples of one patient.

    names: of patients, one a sample. where(i): file and row, for errors. missing: texts that name nobody.
    Raises DataError on a sample without a patient.
    """
    if nobody := {*names} & {*missing}:
        row = min(names.index(name) for name in nobody)
        found = f", {names[row]!r}" if names[row] else ""
        raise DataError(
            f"{where(row)}: the patient is empty{found}; every sample needs one: fill it in, or take "
            "the row out"
        )
    return group_by_text("patient", names)


def _hash_contents(kind: str, contents: Iterator[bytes | memoryview], count: int) -> np.ndarray:
    found = np.empty((count, DIGEST_BYTES), dtype=np.uint8)
    for row, content in enumerate(contents):
        digest = hashlib.sha256(f"{kind}:".encode())
        digest.update(content)
        found[row] = np.frombuffer(digest.digest(), dtype=np.uint8)
    return found


@dataclass(frozen=True, eq=False)
class KeyedHash:
    """Choices among N records by a keyed hash. groups: (N, 32) uint8, of content_groups or text_groups."""

    key: bytes
    groups: np.ndarray

    def values(self, purpose: Purpose, rows: np.ndarray) -> np.ndarray:
        """(n,) uint64 keyed hashes of the records at rows, uniform, and equal for records of one group."""
        label = f"{purpose}:".encode()
        found = [hmac.digest(self.key, label + group.tobytes(), "sha256")[:8] for group in self.groups[rows]]
        return np.frombuffer(b"".join(found), dtype=">u8").astype(np.uint64)

    def hold_out(self, rows: np.ndarray, share: float, purpose: Purpose) -> tuple[np.ndarray, np.ndarray]:
        """(held out, kept): rows divided by keyed hash, in their order; about `share` of them are held out.

        share: from 0 to 1. rows: (n,) int64. purpose: of the hash; another one chooses independently.
        """
        if share <= 0 or len(rows) == 0:
            return rows[:0], rows
        chosen = mask_below(self.values(purpose, rows), share)
        return rows[chosen], rows[~chosen]

    def cap(self, rows: np.ndarray, limit: float, purpose: Purpose) -> np.ndarray:
        """Choose about `limit` of the rows if it is a whole number, otherwise about that share of them.

        The threshold of a whole number is limit / n, so one more record can push out those whose hash lies
        between two thresholds; with a share it pushes out none.
        """
        share = limit if isinstance(limit, float) else min(1.0, limit / max(len(rows), 1))
        return self.hold_out(rows, share, purpose)[0]

    def shared(self, rows: np.ndarray, others: np.ndarray) -> int:
        """Number of groups that have records both in rows and in others."""
        found, more = ({group.tobytes() for group in self.groups[part]} for part in (rows, others))
        return len(found & more)

    def number_groups(self, rows: Tensor) -> Tensor:
        """(n,) int64: number of each record's group, from 0; equal for records that belong together."""
        _, index = np.unique(self.groups[rows.numpy()], axis=0, return_inverse=True)
        return torch.from_numpy(index.astype(np.int64).reshape(-1))


def mask_below(values: np.ndarray, share: float) -> np.ndarray:
    """(n,) bool: whether each keyed hash, (n,) uint64, lies in the lowest `share` of the range of uint64."""
    if share >= 1:
        return np.ones(len(values), dtype=bool)
    return values < np.uint64(int(share * _RANGE))


IDENTITY_BYTES = 16
Columns = Mapping[str, str | Sequence[str]]


def record_contents(x: Tensor, columns: Columns | None = None) -> np.ndarray:
    """(N, 32) uint8: SHA-256 of each record's decoded content, without a key; it must not leave as it is.

    x: (N, C, H, W) pixels or (N, D) values, before anything that depends on other records is done to them.
    columns: of a table, feature column -> its kind or its categories, in the order of x; None: no table.
    """
    head = f"{x.dtype} {tuple(x.shape[1:])}"
    if columns is not None:
        from perennial.data.table_columns import locate_features

        names, places = sorted(columns), locate_features(columns)
        head = repr([(name, columns[name]) for name in names])
        x = x[:, [place for name in names for place in places[name]]]
    rows = x.cpu().contiguous().flatten(1).numpy()
    found = np.empty((len(rows), DIGEST_BYTES), dtype=np.uint8)
    for row, content in enumerate(rows):
        digest = hashlib.sha256(f"record:{head}:".encode())
        digest.update(content.data)
        found[row] = np.frombuffer(digest.digest(), dtype=np.uint8)
    return found


def compute_identities(key: bytes, purpose: str, contents: Iterable[bytes]) -> np.ndarray:
    """(N, 16) uint8: HMAC-SHA256 of each content under the site's key, cut to 16 bytes.

    purpose: of the hash; two purposes have nothing in common.
    """
    label = f"{purpose}:".encode()
    found = [hmac.digest(key, label + content, "sha256")[:IDENTITY_BYTES] for content in contents]
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, IDENTITY_BYTES)
