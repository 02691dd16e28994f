"""Which samples a site trains on in a round, and which of them it keeps when a task ends."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.exemplars import ExemplarStore, selected, share_by_hash
from perennial.client.learnt import not_learnt, note_learnt
from perennial.client.policy import hides_count, protects_records
from perennial.client.release import charge_first, data_are_read, stays_here
from perennial.client.site import Site
from perennial.data.splits import identities, record_contents
from perennial.foundation.errors import DataError
from perennial.foundation.record_key import record_key
from perennial.foundation.streams import stream
from perennial.learning.evaluation import unit_features
from perennial.models.incremental import IncrementalModel
from perennial.privacy.record_book import Ids, RecordBook, as_ids
from perennial.privacy.released import Mechanism
from perennial.protocol.messages import FinishTaskRequest, TrainRequest
from perennial.protocol.stamp import Stamp

# A record is a row of the site's data. Two rows of one content are two records, both in the release; they
# share one line of payments (privacy/record_book.py), as a row does that was moved or labelled anew. To leave
# one of them out would let a row decide whether another one counts, and one more row could then move a
# release by the replacement of another.
#
# Under a protection of samples or patients a record whose line has paid all that the site's limit allows is
# left out, in silence. What is left decides neither a refusal nor any number that leaves without noise:
# floors, steps, rates and noise follow from all records and public settings.


@dataclass(frozen=True)
class Chosen:
    """The records of one release. rows: (n,) int64 in the site's data.

    ids: of the records or patients that are charged; None: all are. version: of the record book's payments,
    by which they were chosen.
    """

    rows: Tensor
    ids: Ids | None = None
    version: int | None = None


def choose(
    site: Site, mechanism: Mechanism, find: Callable[[], Tensor], charged: Sequence[Mechanism] = ()
) -> Chosen:
    """The records from which a release may be computed, charged for before anything is computed from them.

    mechanism: of the release. charged: what is charged in its place, if anything. find: their rows, (n,)
    int64; it reads the data. Records that have spent the
    site's limit are left out if the release hides a sample or patient. At a simulated site, and for a release
    that hides the whole site, all rows stay and every record pays. Raises PrivacyError where public facts
    alone refuse the release. If finding the rows fails, every record pays, so that no error is free.
    """
    identity, owed = site.identity, charged or (mechanism,)
    protected = [each for each in owed if each.entry.protected]
    for each in protected if identity.deployed else ():
        identity.ledger.require_within(each.entry, identity.policy.limit)
    data_are_read(hidden=bool(protected) or site.experiment.privacy.enabled)
    chosen: Chosen | None = None
    try:
        chosen = found = _chosen(site, mechanism, find())
    finally:
        for each in protected:
            charge_first(identity, each, chosen)
    return found


def _chosen(site: Site, mechanism: Mechanism, rows: Tensor) -> Chosen:
    entry = mechanism.entry
    if not site.identity.deployed or (entry.unit == "site" and entry.protected):
        return Chosen(rows)
    # no record is a set as well: a charge that names none is paid by every record
    lines, patients = _identified(site, rows)
    if not entry.protected:
        return Chosen(rows, lines)
    stays = np.ones(len(rows), dtype=bool)
    limit, ledger = site.identity.policy.limit, site.identity.ledger
    payments = book_of(site.identity.state_dir).payments(ledger)
    if limit is not None:
        stays &= payments.affordable(lines, limit, entry)
    payers = lines
    if patients is not None and entry.unit == "patient":
        payers = patients
        if limit is not None:
            stays &= payments.affordable(patients, limit, entry)
            # a patient takes part with all of their records or with none
            stays &= ~np.isin(patients, patients[~payments.affordable(lines, limit, entry)])
    kept = torch.from_numpy(stays)
    return Chosen(rows[kept.to(rows.device)], payers[stays], payments.version)


def book_of(state_dir: Path) -> RecordBook:
    """The book of records in a site's state_dir."""
    return RecordBook(state_dir, record_key(state_dir))


def _identified(site: Site, rows: Tensor) -> tuple[Ids, Ids | None]:
    """(line of payments of each record, its patient where the data name patients)."""
    data, key = site.data, record_key(site.identity.state_dir)
    at = rows.cpu().numpy()
    if data.contents is None:  # a share of the experiment's data, for a trial without data of its own
        contents, places = record_contents(data.x[rows]), [f"share: {row}" for row in at.tolist()]
    else:
        assert data.places is not None
        contents, places = data.contents[at], [data.places[row] for row in at.tolist()]
    own = identities(key, "record", (content.tobytes() for content in contents))
    lying = identities(key, "place", (place.encode() for place in places))
    patients = None
    if data.patients:
        groups = data.keyed.groups[at]
        patients = as_ids(identities(key, "patient", (group.tobytes() for group in groups)))
    return book_of(site.identity.state_dir).lines_of(own, lying), patients


Previous = tuple[str, dict[str, Tensor]] | None
"""(hash, tensors) of the model of the task before."""


def training_indices(site: Site, stamp: Stamp, previous: Previous) -> tuple[Tensor, int]:
    """(indices of the samples to train on in this task, new ones first; how many of them are exemplars).

    previous: the previous task's model, by which a site that was away chooses exemplars late. In a run that
    goes on, new records of earlier classes count among the exemplars. The policy's floor is checked later, on
    what is computed from them.
    Raises DataError when there is none, unless noise hides that.
    """
    classes = site.task_range(stamp)
    new = indices_left_for_training(site, stamp, site.data.task_indices("train", classes.start, classes.stop))
    old = late = torch.empty(0, dtype=torch.int64)
    if site.experiment.learner.memory is not None and stamp.task > 1:
        if site.experiment.learner.memory.share is None:
            _catch_up(site, site.exemplars(stamp.run), stamp, previous)
        late = not_learnt(site, stamp)
        # a late record that is an exemplar by now trains once: two rows would move an update twice
        found = torch.cat([exemplar_indices(site, stamp, stamp.round, classes.start), late])
        old = found[np.sort(np.unique(found.numpy(), return_index=True)[1])]
    if site.experiment.data.kind.collected:
        note_learnt(site, stamp, torch.cat([new, late]))
    indices = torch.cat([new, old])
    if len(indices) == 0 and not hides_count(site.identity):
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    return indices, len(old)


def exemplar_indices(site: Site, stamp: Stamp, before_round: int, known: int) -> Tensor:
    """(k,) int64 rows of the exemplars before a round, by class, the most important first.

    Under a memory of a share nothing is chosen and nothing stored: every record of the `known` classes whose
    own hash is low is an exemplar. A choice that is made once would let one record decide whether its class
    counts as chosen, and so whether all later records of the class do.
    """
    memory = site.experiment.learner.memory
    if memory is None or memory.share is None:
        return site.exemplars(stamp.run).indices(before_round)
    rows = site.data.task_indices("train", 0, known)
    return rows[
        share_by_hash(site.data.keyed.values("exemplars", rows.numpy()), site.data.y[rows], memory.share)
    ]


def require_exemplars(site: Site, request: Stamp) -> None:
    """Raises RecordGone where the exemplars that a request takes are kept no longer, before data are read."""
    learner = site.experiment.learner
    if learner.memory is None or learner.memory.share is not None:
        return
    judges = learner.classifier == "nearest_mean" and request.message_type.partition(".")[0] != "query"
    if isinstance(request, TrainRequest):
        site.exemplars(request.run).require(request.round)
    elif isinstance(request, FinishTaskRequest) or judges:
        site.exemplars(request.run).require(request.round + 1)


def _catch_up(site: Site, store: ExemplarStore, request: Stamp, previous: Previous) -> None:
    """Choose the exemplars of tasks that ended while the site was away, with the previous task's model.

    Whether a version is written follows from the requests that the site answered, and from no record: not
    from whether it has records or exemplars of a class.
    """
    if previous is None:
        return
    known = site.task_range(request).start
    missed = store.missed(request.round, known)
    if missed:
        choose_exemplars(site, store, site.models.teacher(previous), missed, known, version=request.round - 1)


def choose_exemplars(
    site: Site, store: ExemplarStore, model: IncrementalModel, labels: Sequence[int], known: int, version: int
) -> None:
    """Choose and store exemplars of the classes in labels, within the memory's budget.

    known: classes known in all, which share the budget. version: the round after which the choice holds.
    Under a protection a choice that fails writes its version too, with the exemplars that there were: a
    version that is missing would tell the server that one record made it fail.
    """
    memory = site.experiment.learner.memory
    assert memory is not None
    if memory.share is not None:
        return
    quota = memory.quota(known, site.process.sites)
    chosen: dict[int, Tensor] = {}
    with stays_here("exemplars") if protects_records(site.identity) else nullcontext():
        for label in labels:
            indices = site.data.task_indices("train", label, label + 1)
            if len(indices) == 0:
                continue
            features = None
            if memory.selection != "random":
                features = unit_features(model, site.samples(indices))
            hashes = site.data.keyed.values("exemplars", indices.numpy())
            chosen[label] = indices[selected(memory, hashes, features, quota)]
    store.keep(labels, chosen, quota, known, version)


def balanced_choice(labels: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """Sorted (count,) int64 indices into labels, (n,) int64, as evenly over classes as there are samples.

    A class that has too few gives all of them, and the others fill up. A draw decides which classes give one
    more than others. Raises ValueError unless 1 <= count <= n.
    """
    if not 1 <= count <= len(labels):
        raise ValueError(f"count: found {count}, allowed 1 to {len(labels)}")
    order = generator.permutation(len(labels))
    _, inverse, sizes = np.unique(labels.cpu().numpy()[order], return_inverse=True, return_counts=True)
    # how many of its class come before each sample: taking by turns is taking the lowest of these
    by_class = np.argsort(inverse, kind="stable")
    turn = np.empty(len(order), dtype=np.int64)
    turn[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = order[np.argsort(turn, kind="stable")[:count]]
    return torch.from_numpy(np.sort(chosen))


def indices_left_for_training(site: Site, request: Stamp, indices: Tensor) -> Tensor:
    """indices (n,) of the task's new samples, or those of them that pre-training leaves for this round.

    Raises ConfigError when the site has fewer than pre-training asks of each site, unless noise hides that:
    then all of them are taken.
    """
    config = site.experiment.pretraining
    if config is None or request.task != 1:
        return indices
    if not hides_count(site.identity):
        config.require(site.name, len(indices))
    elif len(indices) <= config.samples:
        return indices
    generator = stream(site.experiment.seed, "pretraining", site.name)
    chosen = balanced_choice(site.data.y[indices], config.samples, generator)
    if request.round <= config.rounds:
        return indices[chosen]
    if not config.exclude:
        return indices
    rest = torch.ones(len(indices), dtype=torch.bool)
    rest[chosen] = False
    return indices[rest]
