"""Stratified choices: test and validation parts, caps, and the shares of a central test set.

Every choice inside one class comes from a stream named after the class (and the site), so that it does not
change when other classes are added, and a deployed site chooses as its simulated twin does.
"""

from collections.abc import Sequence

import numpy as np

from data.apportion import apportion
from foundation.streams import stream


def hold_out(
    rows: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    seed: int,
    stream_ids: Sequence[str],
    *,
    fraction: float,
    least: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(held out, kept), each sorted: about fraction of every class among rows.

    rows: (n,) int64 into labels, (N,) internal. A class with at least `least` samples gives at least one, and
    none gives its last. stream_ids: purpose, then names of who chooses.
    """
    groups = _classes(rows, labels)
    counts = [
        min(len(group) - 1, max(int(fraction * len(group) + 0.5), int(fraction > 0 and len(group) >= least)))
        for _, group in groups
    ]
    return _draw(groups, counts, names, seed, stream_ids)


def cap(
    rows: np.ndarray, labels: np.ndarray, names: Sequence[str], limit: int, seed: int, *stream_ids: str
) -> np.ndarray:
    """About limit of rows, in the proportions of their classes, at least one of each; sorted."""
    if len(rows) <= limit:
        return rows
    groups = _classes(rows, labels)
    sizes = np.array([[len(group) for _, group in groups]])
    counts = np.maximum(apportion(np.array([limit]), sizes)[0], 1).tolist()
    return _draw(groups, counts, names, seed, stream_ids)[0]


def share_out(
    rows: np.ndarray, labels: np.ndarray, names: Sequence[str], held: np.ndarray, seed: int
) -> list[np.ndarray]:
    """rows of a central test set divided among N sites as their training samples are; each part sorted.

    held: (classes, N) training samples. A class that nobody holds stays with nobody.
    """
    sites = held.shape[1]
    shares: list[list[np.ndarray]] = [[np.empty(0, dtype=np.int64)] for _ in range(sites)]
    for label, group in _classes(rows, labels):
        if held[label].sum() == 0:
            continue
        counts = apportion(np.array([len(group)]), held[label][None])[0]
        shuffled = stream(seed, "test-share", names[label]).permutation(group)
        for share, part in zip(shares, np.split(shuffled, np.cumsum(counts)[:-1]), strict=True):
            share.append(part)
    return [np.sort(np.concatenate(share)) for share in shares]


def _classes(rows: np.ndarray, labels: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(label, rows of it in order) of each class that occurs."""
    order = np.argsort(labels[rows], kind="stable")
    found, starts = np.unique(labels[rows][order], return_index=True)
    return list(zip(found.tolist(), np.split(rows[order], starts[1:]), strict=True)) if len(rows) else []


def _draw(
    groups: Sequence[tuple[int, np.ndarray]],
    counts: Sequence[int],
    names: Sequence[str],
    seed: int,
    ids: Sequence[str],
) -> tuple[np.ndarray, np.ndarray]:
    purpose, *who = ids
    chosen, rest = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for (label, group), count in zip(groups, counts, strict=True):
        shuffled = stream(seed, purpose, *who, names[label]).permutation(group) if count else group
        chosen.append(shuffled[:count])
        rest.append(shuffled[count:])
    return np.sort(np.concatenate(chosen)), np.sort(np.concatenate(rest))
