"""A site's exemplars: chosen at the end of a task, and looked up in the site's own data in later ones.

What is stored is which samples, not the samples: their index in the data, their label and a hash of their
content, so that data that was moved or added to in between is noticed and followed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perennial.client.state import SiteState
from perennial.config.learner import Memory
from perennial.data.federation import SiteData
from perennial.foundation.errors import StateError
from perennial.foundation.site_log import log
from perennial.learning.exemplar_selection import herding, nearest, random_by_hash, share_by_hash

RECORD = "exemplars"


class ExemplarStore:
    """The exemplars of one site. classes: the names in registry order; site_data: where the samples are."""

    def __init__(self, state: SiteState, data: SiteData, classes: Sequence[str]) -> None:
        self._state = state
        self._data = data
        self._classes = list(classes)

    def indices(self, before_round: int) -> Tensor:
        """(k,) indices in the site's data of the exemplars that were chosen before a round.

        Classes come in order, and each class's list in order of importance.
        Raises StateError when the record is of another class order. Samples that are gone are left out.
        """
        record = self._state.get(RECORD, before_round)
        if record is None:
            return torch.empty(0, dtype=torch.int64)
        tensors, facts = record
        known = facts["classes"]
        if self._classes[: len(known)] != known:
            raise StateError(
                f"exemplars of site {self._state.site!r}: chosen under class order {known}, "
                f"this experiment has {self._classes}; use another state_dir"
            )
        return self._located(tensors["index"], facts["hashes"])

    def choose(
        self,
        memory: Memory,
        quota: int,
        features: dict[int, Tensor],
        members: dict[int, Tensor],
        version: int,
    ) -> None:
        """Choose exemplars of the task's classes and shorten the older lists to the quota, in one record.

        features, members: for each new class, (n_c, d) features and the (n_c,) indices in the site's data.
        version: the round after which this holds.
        A class with fewer samples than the quota keeps them all, and the site's log says so.
        """
        kept = self.indices(before_round=version + 1)
        labels = self._data.y[kept]
        lists: dict[int, Tensor] = {}
        for label in labels.unique().tolist():
            if label not in members:
                lists[label] = kept[labels == label][:quota]
        for label, indices in members.items():
            if memory.selection == "random":
                hashes = self._data.keyed.values("exemplars", indices.numpy())
                chosen = (
                    random_by_hash(hashes, quota)
                    if memory.share is None
                    else share_by_hash(hashes, memory.share)
                )
            else:
                select = herding if memory.selection == "herding" else nearest
                chosen = select(features[label], quota)
            lists[label] = indices[chosen]
        short = [
            f"{self._classes[label]} {len(indices)}"
            for label, indices in members.items()
            if memory.share is None and len(indices) < quota
        ]
        if short:
            log.info("%s: below the quota of %d exemplars: %s", self._state.site, quota, ", ".join(short))
        order = [lists[label] for label in sorted(lists)]
        index = torch.cat(order) if order else torch.empty(0, dtype=torch.int64)
        contents = [self._data.sample_hash(int(i)) for i in index]
        self._state.put(RECORD, version, {"index": index}, {"classes": self._classes, "hashes": contents})

    def _located(self, index: Tensor, hashes: list[str]) -> Tensor:
        """index, corrected where the samples have moved since."""
        size = len(self._data.y)
        moved = [
            position
            for position, (place, digest) in enumerate(zip(index.tolist(), hashes, strict=True))
            if place >= size or self._data.sample_hash(place) != digest
        ]
        if not moved:
            return index
        where = {self._data.sample_hash(place): place for place in range(size)}
        gone = [position for position in moved if hashes[position] not in where]
        if gone:
            # a refusal would tell the server which records were erased, and stop the site from training
            log.warning(
                "%d of %d exemplars are gone from the data (first: sample %s); training goes on without them",
                len(gone),
                len(hashes),
                hashes[gone[0]][:12],
            )
        index = index.clone()
        for position in moved:
            index[position] = where.get(hashes[position], -1)
        return index[index >= 0]
