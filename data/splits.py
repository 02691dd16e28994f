"""Stratified choices: test and validation parts, caps, and the shares of a central test set.

Every choice inside one class comes from a stream named after the class (and the site), so that it does not
change when other classes are added, and a deployed site chooses as its simulated twin does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perennial.data.apportion import apportion
from perennial.foundation.streams import stream

LEAST_CENTRAL = 2
"""A class of a central data set gives a test sample from so many samples on: it must be tested."""
LEAST_AT_SITE = 5
"""A class at one site gives a test or validation sample from so many samples on: it can spare one."""


@dataclass(frozen=True, eq=False)
class Strata:
    """labels: (N,) internal; names: of the classes. Rows are int64 indices into labels, sorted."""

    labels: np.ndarray
    names: Sequence[str]
    seed: int

    def hold_out(
        self, rows: np.ndarray, fraction: float, least: int, *stream_ids: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(held out, kept): about fraction of every class among rows.

        A class with at least `least` samples gives one or more; none gives its last sample.
        stream_ids: purpose, then the name of the site that chooses, if one does.
        """
        groups = self._classes(rows)
        sizes = [len(group) for _, group in groups]
        asked = [max(int(fraction * size + 0.5), int(fraction > 0 and size >= least)) for size in sizes]
        return self._draw(
            groups, [min(n, size - 1) for n, size in zip(asked, sizes, strict=True)], stream_ids
        )

    def cap(self, rows: np.ndarray, limit: int, *stream_ids: str) -> np.ndarray:
        """About limit of rows, in the proportions of their classes, at least one of each."""
        if len(rows) <= limit:
            return rows
        groups = self._classes(rows)
        sizes = np.array([[len(group) for _, group in groups]])
        counts = np.maximum(apportion(np.array([limit]), sizes)[0], 1).tolist()
        return self._draw(groups, counts, stream_ids)[0]

    def share_out(self, rows: np.ndarray, held: np.ndarray) -> list[np.ndarray]:
        """The rows of a central test set, divided among N sites as their training samples are.

        held: (classes, N) training samples; every class of rows is held by somebody.
        """
        shares: list[list[np.ndarray]] = [[] for _ in range(held.shape[1])]
        for label, group in self._classes(rows):
            counts = apportion(np.array([len(group)]), held[label][None])[0]
            shuffled = stream(self.seed, "test-share", self.names[label]).permutation(group)
            for share, part in zip(shares, np.split(shuffled, np.cumsum(counts)[:-1]), strict=True):
                share.append(part)
        return [joined(share) for share in shares]

    def _classes(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(label, rows of it in order) of each class that occurs."""
        if len(rows) == 0:
            return []
        by_label = rows[np.argsort(self.labels[rows], kind="stable")]
        found, starts = np.unique(self.labels[by_label], return_index=True)
        return list(zip(found.tolist(), np.split(by_label, starts[1:]), strict=True))

    def _draw(
        self, groups: Sequence[tuple[int, np.ndarray]], counts: Sequence[int], stream_ids: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        purpose, *who = stream_ids
        chosen, rest = [], []
        for (label, group), count in zip(groups, counts, strict=True):
            if count:
                group = stream(self.seed, purpose, *who, self.names[label]).permutation(group)  # noqa: PLW2901
            chosen.append(group[:count])
            rest.append(group[count:])
        return joined(chosen), joined(rest)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All rows of the parts, sorted; (0,) int64 for no parts."""
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
