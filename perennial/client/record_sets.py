"""Which records a release is computed from, and to which records it is charged.

A record is a row of the site's data. Two rows of one content are two records, both in the release; they share
one line of payments (privacy/record_book.py), as a row does that was moved or labelled anew. To leave one of
them out would let a row decide whether another one counts, and one more row could then move a release by the
replacement of another.

Under a protection of samples or patients a record whose line has paid all that the site's limit allows is
left out, in silence. What is left decides neither a refusal nor any number that leaves without noise: steps,
rates and noise follow from public settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.release import charge_first, data_are_read
from perennial.client.site import Site
from perennial.data.splits import identities, record_contents
from perennial.foundation.record_key import record_key
from perennial.privacy.record_book import Ids, RecordBook, as_ids
from perennial.privacy.released import Mechanism


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
    chosen = None
    try:
        chosen = _chosen(site, mechanism, find())
    finally:
        for each in protected:
            charge_first(identity, each, chosen)
    return chosen


def _chosen(site: Site, mechanism: Mechanism, rows: Tensor) -> Chosen:
    entry = mechanism.entry
    if not site.identity.deployed or (entry.unit == "site" and entry.protected) or len(rows) == 0:
        return Chosen(rows)
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
