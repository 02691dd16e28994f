"""A site's exemplars: chosen at the end of a task, and looked up in the site's own data in later ones.

What is stored is which samples, not the samples: their index in the data, their label and a hash of their
content, so that data that was moved or added to in between is noticed and followed.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from perennial.client.state import SiteState
from perennial.config.learner import Memory
from perennial.data.federation import SiteData
from perennial.data.splits import mask_below
from perennial.foundation.errors import StateError
from perennial.foundation.site_log import log

RECORD = "exemplars"


class ExemplarStore:
    """The exemplars of one site. classes: the names in registry order; site_data: where the samples are."""

    def __init__(self, state: SiteState, data: SiteData, classes: Sequence[str]) -> None:
        self._state = state
        self._data = data
        self._classes = list(classes)

    def find_indices(self, before_round: int) -> Tensor:
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
        return self._correct_index(tensors["index"], facts["hashes"], facts.get("labels"))

    def require(self, before_round: int) -> None:
        """Raises RecordGone as indices() does, from the names of files alone; no record decides it.

        Under a protection it is asked before the data are read: which versions there are follows from the
        requests that the site answered.
        """
        self._state.require(RECORD, before_round)

    def list_missed_labels(self, before_round: int, known: int) -> list[int]:
        """Labels below `known` whose exemplars nobody has chosen yet, whether or not there are records."""
        record = self._state.get(RECORD, before_round)
        # a record of an earlier version does not say; its choices are taken to be made
        made = set() if record is None else set(record[1].get("made", range(known)))
        return [label for label in range(known) if label not in made]

    def keep(
        self, labels: Iterable[int], chosen: Mapping[int, Tensor], quota: int, known: int, version: int
    ) -> None:
        """Keep the exemplars that were chosen, and the older lists shortened to the quota, in one record.

        labels: of the classes whose choice was made; those that are not in `chosen` keep their older list, if
        they have one. chosen: by label, indices in the site's data. known: classes known in all. version: the
        round after which this holds. A class with fewer samples than the quota keeps them all, and the
        site's log says so.
        """
        made = {*range(known)} - {*self.list_missed_labels(version + 1, known)}
        kept = self.find_indices(before_round=version + 1)
        older = self._data.y[kept]
        lists = {label: kept[older == label][:quota] for label in older.unique().tolist()} | dict(chosen)
        short = [
            f"{self._classes[label]} {len(indices)}"
            for label, indices in chosen.items()
            if len(indices) < quota
        ]
        if short:
            log.info("%s: below the quota of %d exemplars: %s", self._state.site, quota, ", ".join(short))
        order = [lists[label] for label in sorted(lists)]
        index = torch.cat(order) if order else torch.empty(0, dtype=torch.int64)
        contents = [self._data.sample_hash(int(i)) for i in index]
        facts = {
            "classes": self._classes,
            "hashes": contents,
            "labels": self._data.y[index].tolist(),
            "made": sorted(made.union(labels)),
        }
        self._state.put(RECORD, version, {"index": index}, facts)

    def _correct_index(self, index: Tensor, hashes: list[str], labels: list[int] | None) -> Tensor:
        """index, corrected where the samples have moved since: each to a row of its own content and label.

        labels: None in a record of an earlier version, whose exemplars are found by content alone. No row
        comes twice: an update could count it twice.
        """
        size = len(self._data.y)
        labels = [-1] * len(hashes) if labels is None else labels

        def identify(place: int, label: int) -> tuple[str, int]:
            return self._data.sample_hash(place), int(self._data.y[place]) if label >= 0 else -1

        wanted = [*zip(hashes, labels, strict=True)]
        moved = [
            position
            for position, (place, each) in enumerate(zip(index.tolist(), wanted, strict=True))
            if place >= size or identify(place, each[1]) != each
        ]
        if not moved:
            return index
        where: dict[tuple[str, int], list[int]] = {}
        stays = {*index.tolist()} - {int(index[position]) for position in moved}
        for place in reversed(range(size)):
            if place not in stays:
                where.setdefault(identify(place, labels[0]), []).append(place)
        found = {
            position: where[each].pop() if where.get(each := wanted[position]) else -1 for position in moved
        }
        gone = [position for position in moved if found[position] < 0]
        if gone:
            # a refusal would tell the server which records were erased, and stop the site from training
            log.warning(
                "%d of %d exemplars are gone from the data (first: sample %s); training goes on without them",
                len(gone),
                len(hashes),
                hashes[gone[0]][:12],
            )
        index = index.clone()
        for position, place in found.items():
            index[position] = place
        return index[index >= 0]


def select_exemplars(memory: Memory, hashes: np.ndarray, features: Tensor | None, quota: int) -> Tensor:
    """Indices, most important first, of the exemplars of one class, as the memory selects them.

    hashes: (n,) uint64, keyed. features: (n, d), or None where the selection is random. A sample whose
    features are not all finite counts as the farthest: a model can be made so that one sample's overflow.
    """
    if memory.selection == "random":
        return select_by_hash(hashes, quota)
    assert features is not None
    select = select_by_herding if memory.selection == "herding" else select_nearest
    finite = features.isfinite().all(dim=1).cpu()
    usable, rest = finite.nonzero()[:, 0], (~finite).nonzero()[:, 0]
    if len(usable) == 0:
        return rest[:quota]
    return torch.cat([usable[select(features[usable.to(features.device)], quota)], rest])[:quota]


def _check_budget(features: Tensor, budget: int) -> int:
    if len(features) == 0:
        raise ValueError("exemplars of an empty class")
    if budget < 1:
        raise ValueError(f"exemplar budget: found {budget}, allowed 1 or more")
    return min(budget, len(features))


def select_by_herding(features: Tensor, budget: int) -> Tensor:
    """Indices of the samples whose running mean stays closest to the class mean.

    features: (n, d), one class, rows of unit length.
    Returns (min(budget, n),) int64, most important first, so that a prefix is the choice
    for a smaller budget.
    Raises ValueError on an empty class or a budget below 1.

    Rebuffi et al. 2017 (arXiv 1611.07725), algorithm 4.
    """
    size = _check_budget(features, budget)
    features = features.double()
    mean = features.mean(dim=0)
    total = torch.zeros_like(mean)
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen = []
    for step in range(1, size + 1):
        distance = ((total + features) / step - mean).square().sum(dim=1)
        # the first minimum: torch.argmin does not promise which of several equal ones it returns
        distance = distance.masked_fill(~free, torch.inf)
        index = int((distance == distance.min()).nonzero()[0])
        chosen.append(index)
        free[index] = False
        total += features[index]
    return torch.tensor(chosen, dtype=torch.int64)


def select_nearest(features: Tensor, budget: int) -> Tensor:
    """Indices of the samples closest to the class mean, closest first; shapes and errors as herding."""
    size = _check_budget(features, budget)
    features = features.double()
    distance = (features - features.mean(dim=0)).square().sum(dim=1)
    return torch.sort(distance, stable=True).indices[:size].cpu()


def select_by_hash(hashes: np.ndarray, budget: int) -> Tensor:
    """Indices of the samples with the smallest keyed hash.

    The choice does not depend on any property of a sample, but one more sample can displace another.

    hashes: (n,) uint64.
    Returns (min(budget, n),) int64, smallest hash first.
    Raises ValueError on an empty class or a budget below 1.
    """
    size = _check_budget(torch.empty(len(hashes), 0), budget)
    return torch.from_numpy(np.argsort(hashes, kind="stable")[:size])


def share_by_hash(hashes: np.ndarray, labels: Tensor, share: float) -> Tensor:
    """Indices of the samples whose keyed hash is among the lowest `share` of all possible hashes.

    Adding or removing a sample does not change whether another one is chosen.

    hashes: (n,) uint64, equal for samples of one patient, which are kept together. labels: (n,) int64.
    Returns (k,) int64, by class, smallest hash first; k is about share * n and can be 0.
    """
    order = np.lexsort((hashes, labels.cpu().numpy()))
    return torch.from_numpy(order[mask_below(hashes[order], share)])
