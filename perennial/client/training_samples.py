"""Which samples a site trains on in a round, and which of them it keeps when a task ends."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.exemplars import ExemplarStore, select_exemplars, share_by_hash
from perennial.client.learnt import find_unlearnt, note_learnt
from perennial.client.policy import hides_count, protects_records
from perennial.client.release import charge_first, contain_errors, note_data_read
from perennial.client.site import Site
from perennial.data.splits import compute_identities
from perennial.foundation.errors import DataError
from perennial.foundation.record_key import record_key
from perennial.foundation.streams import stream
from perennial.learning.evaluation import compute_unit_features
from perennial.models.incremental import IncrementalModel
from perennial.privacy.entries import Entry
from perennial.privacy.record_book import NO_IDS, Ids, RecordBook, as_ids, count_times
from perennial.privacy.released import Mechanism
from perennial.protocol.messages import FinishTaskRequest, TrainRequest
from perennial.protocol.stamp import Stamp

# A record is a row of the site's data, and two rows of one content are two records, both in the release.
# Whether a row is in a release follows from the row, its own past and public settings: budgets are public
# (privacy/ledger.py), and no row is left out because of what it or another one has paid.
#
# One thing public facts cannot know: that a row was in another task of the run under another label. Rows are
# known by content alone, so the site counts. A task held a content five times when it was released, and holds
# it three times now: then two rows have left it, and two rows of that content stay out of the others. A row
# that is there under one label throughout is counted both times, and keeps nobody out.


def choose(
    site: Site, mechanism: Mechanism, find: Callable[[], Tensor], charged: Sequence[Mechanism] = ()
) -> Tensor:
    """Rows, (n,) int64, from which a release may be computed, charged for before anything is computed.

    mechanism: of the release. charged: what is charged in its place, if anything. find: the rows that are
    asked for; it reads the data. Of a task of a run, rows that were in another task of it are left out, in
    silence. Raises PrivacyError where public facts alone refuse the release, StateError where it is not known
    which rows were in another task. An error while the rows are found is charged as a release.
    """
    identity, owed = site.identity, charged or (mechanism,)
    protected = [each for each in owed if each.entry.protected] if site.identity.deployed else []
    for each in protected:
        identity.ledger.require_within(each.entry, identity.policy.limit)
        _list_other_parts(site, each.entry)
    hidden = any(each.entry.protected for each in owed)
    note_data_read(hidden=hidden or site.experiment.privacy.enabled)
    held = {each.entry: NO_IDS for each in protected if each.entry.scope}
    try:
        # not what was found: an error that hangs on one record must not decide which others were noted
        held = {entry: _list_part_ids(site, entry.part) for entry in held}
        rows = find()
    finally:
        for each in protected:
            entry = each.entry
            if entry in held:
                entry = open_book(identity.state_dir).note(entry, held[entry])
            charge_first(identity, each, entry)
    for each in protected:
        if each.entry.scope:
            rows = rows[~_mark_departed(site, each.entry, rows)]
    return rows


def _mark_departed(site: Site, entry: Entry, rows: Tensor) -> Tensor:
    """(n,) bool: of each content the first rows, as many as have left some other part of the run."""
    own, place = np.unique(_hash_rows(site, rows), return_inverse=True)
    gone = np.zeros(len(own), dtype=np.int64)
    # the book is read after this release was noted: of two at a time, one finds the other
    for part, sets in _list_other_parts(site, entry).items():
        held = np.max([count_times(ids, own) for ids in sets], axis=0)
        gone = np.maximum(gone, held - count_times(_list_part_ids(site, part), own))
    order = np.argsort(place, kind="stable")
    first = np.searchsorted(place[order], np.arange(len(own)))
    turn = np.empty(len(rows), dtype=np.int64)
    turn[order] = np.arange(len(rows)) - first[place[order]]
    return torch.from_numpy(turn < gone[place]).to(rows.device)


def _list_other_parts(site: Site, entry: Entry) -> dict[str, list[Ids]]:
    """The contents of the run's other tasks when they were released, by part."""
    if not entry.scope:
        return {}
    return open_book(site.identity.state_dir).read_other_parts(entry, site.identity.ledger.totals())


def open_book(state_dir: Path) -> RecordBook:
    """The book of records in a site's state_dir."""
    return RecordBook(state_dir, record_key(state_dir))


def _list_part_ids(site: Site, part: str) -> Ids:
    """The contents of the classes of a part, "SCOPE/task NUMBER", of this run now, sorted.

    Held-out rows too: a row whose text another program wrote anew may go from one of the site's parts to
    another, and has not left its task.
    """
    classes = site.process.registry.schedule.list_classes(int(part.rpartition("/task ")[2]))
    labels = site.data.y
    return np.sort(
        _hash_rows(site, torch.nonzero((labels >= classes.start) & (labels < classes.stop)).squeeze(1))
    )


def _hash_rows(site: Site, rows: Tensor) -> Ids:
    """(n,) keyed hashes of the contents at rows."""
    key = record_key(site.identity.state_dir)
    return as_ids(
        compute_identities(key, "record", (each.tobytes() for each in site.data.hash_contents(rows)))
    )


Previous = tuple[str, dict[str, Tensor]] | None
"""(hash, tensors) of the model of the task before."""


def find_training_indices(site: Site, stamp: Stamp, previous: Previous) -> tuple[Tensor, int]:
    """(indices of the samples to train on in this task, new ones first; how many of them are exemplars).

    previous: the previous task's model, by which a site that was away chooses exemplars late. In a run that
    goes on, new records of earlier classes count among the exemplars. The policy's floor is checked later, on
    what is computed from them.
    Raises DataError when there is none, unless noise hides that.
    """
    classes = site.find_task_range(stamp)
    new = select_round_indices(site, stamp, site.data.find_task_indices("train", classes.start, classes.stop))
    old = late = torch.empty(0, dtype=torch.int64)
    if site.experiment.learner.memory is not None and stamp.task > 1:
        if site.experiment.learner.memory.share is None:
            _choose_missed_exemplars(site, site.open_exemplars(stamp.run), stamp, previous)
        late = find_unlearnt(site, stamp)
        # a late record that is an exemplar by now trains once: two rows would move an update twice
        found = torch.cat([find_exemplar_indices(site, stamp, stamp.round, classes.start), late])
        old = found[np.sort(np.unique(found.numpy(), return_index=True)[1])]
    if site.experiment.data.kind.collected:
        note_learnt(site, stamp, torch.cat([new, late]))
    indices = torch.cat([new, old])
    if len(indices) == 0 and not hides_count(site.identity):
        raise DataError("no samples to train on in this task: no new data and no exemplars")
    return indices, len(old)


def find_exemplar_indices(site: Site, stamp: Stamp, before_round: int, known: int) -> Tensor:
    """(k,) int64 rows of the exemplars before a round, by class, the most important first.

    Under a memory of a share nothing is chosen and nothing stored: every record of the `known` classes whose
    own hash is low is an exemplar. A choice that is made once would let one record decide whether its class
    counts as chosen, and so whether all later records of the class do.
    """
    memory = site.experiment.learner.memory
    if memory is None or memory.share is None:
        return site.open_exemplars(stamp.run).find_indices(before_round)
    rows = site.data.find_task_indices("train", 0, known)
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
        site.open_exemplars(request.run).require(request.round)
    elif isinstance(request, FinishTaskRequest) or judges:
        site.open_exemplars(request.run).require(request.round + 1)


def _choose_missed_exemplars(site: Site, store: ExemplarStore, request: Stamp, previous: Previous) -> None:
    """Choose the exemplars of tasks that ended while the site was away, with the previous task's model.

    Whether a version is written follows from the requests that the site answered, and from no record: not
    from whether it has records or exemplars of a class.
    """
    if previous is None:
        return
    known = site.find_task_range(request).start
    missed = store.list_missed_labels(request.round, known)
    if missed:
        choose_exemplars(
            site, store, site.models.load_teacher(previous), missed, known, version=request.round - 1
        )


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
    quota = memory.compute_quota(known, site.process.sites)
    chosen: dict[int, Tensor] = {}
    with contain_errors("exemplars") if protects_records(site.identity) else nullcontext():
        for label in labels:
            indices = site.data.find_task_indices("train", label, label + 1)
            if len(indices) == 0:
                continue
            features = None
            if memory.selection != "random":
                features = compute_unit_features(model, site.samples(indices))
            hashes = site.data.keyed.values("exemplars", indices.numpy())
            chosen[label] = indices[select_exemplars(memory, hashes, features, quota)]
    store.keep(labels, chosen, quota, known, version)


def choose_balanced(labels: Tensor, count: int, generator: np.random.Generator) -> Tensor:
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


def select_round_indices(site: Site, request: Stamp, indices: Tensor) -> Tensor:
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
    chosen = choose_balanced(site.data.y[indices], config.samples, generator)
    if request.round <= config.rounds:
        return indices[chosen]
    if not config.exclude:
        return indices
    rest = torch.ones(len(indices), dtype=torch.bool)
    rest[chosen] = False
    return indices[rest]
