"""Records that a site takes back from a finished closed-form run: the sums that they had a part in.

The server subtracts them. The sums of one record are that record's features, so withdrawals are gathered
until they reach the policy's floor, class by class.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.floor import exempt, withheld
from perennial.client.policy import check_answer, check_statistics
from perennial.client.release import charge_entry
from perennial.client.site import Site
from perennial.client.statistics import collected, training_counts
from perennial.config import charges
from perennial.data.splits import text_groups
from perennial.foundation.errors import ConfigError, DataError, PolicyRefusal
from perennial.learning.analytic.files import write_by_task
from perennial.learning.analytic.statistics import Statistics


def of_patients(site: Site, names: Sequence[str]) -> Tensor:
    """Places of all records of these patients.

    Raises ConfigError where the data name no patients, DataError naming those who are not in them.
    """
    if not site.data.patients:
        raise ConfigError("--patients: this site's data name no patients; give the records themselves")
    wanted = text_groups("patient", names)
    known = {group.tobytes() for group in site.data.keyed.groups}
    if strangers := [n for n, group in zip(names, wanted, strict=True) if group.tobytes() not in known]:
        raise DataError(f"--patients: not in this site's data: {', '.join(strangers[:5])}")
    sought = {group.tobytes() for group in wanted}
    rows = [place for place, group in enumerate(site.data.keyed.groups) if group.tobytes() in sought]
    return torch.tensor(rows, dtype=torch.int64)


def of_contents(site: Site, x: Tensor) -> Tensor:
    """Places of all records with the content of one of x, (n, ...) as a source gives them.

    Raises DataError where one is not among this site's data.
    """
    own = torch.cat([site.data.part(part) for part in ("train", "validation", "test")])
    places: dict[bytes, list[int]] = {}
    for place in own.tolist():
        places.setdefault(_content(site.data.x[place]), []).append(place)
    missing = [row for row in range(len(x)) if _content(x[row]) not in places]
    if missing:
        raise DataError(
            f"records: {len(missing)} of {len(x)} are not among this site's data (the first: number "
            f"{missing[0] + 1}); allowed: records as the site holds them"
        )
    found = {place for row in x for place in places[_content(row)]}
    return torch.tensor(sorted(found), dtype=torch.int64)


def withdraw(site: Site, run: str, chosen: Tensor, path: Path) -> dict[int, Statistics]:
    """Write the sums of the chosen records to a file for the server, and charge them; returns them by task.

    chosen: places of records; those that are no training samples are in no sum. Raises PolicyRefusal where
    a class would lose, or keep, fewer samples than the floor; DataError where nothing is withdrawn.
    """
    policy, experiment = site.identity.policy, site.experiment
    check_answer(policy, "statistics")
    check_statistics(policy, experiment)
    if experiment.privacy.enabled:
        raise ConfigError(
            "privacy: the sums left with noise; a corrected release needs fresh noise and a new charge"
        )
    backbone, schedule = site.models.fixed_features(), site.process.registry.schedule
    found: dict[int, Statistics] = {}
    for task in range(1, schedule.count + 1):
        classes = schedule.classes_of(task)
        counts = training_counts(site, classes)
        stay = withheld(policy, "statistics", counts)
        told = [label for place, label in enumerate(classes) if counts[place] and place not in stay]
        rows = site.data.task_indices("train", classes.start, classes.stop)
        rows = rows[torch.isin(rows, chosen) & torch.isin(site.data.y[rows], torch.tensor(told))]
        if len(rows):
            _check_classes(site, rows, told)
            found[task] = collected(site, backbone, classes, rows)
    if not found:
        raise DataError(
            f"records: none of these {len(chosen)} is a training sample of this run whose sums left the "
            "site; there is nothing to take back"
        )
    if site.identity.deployed:
        charge_entry(site, charges.in_the_clear(experiment, run, "statistics"))
    facts = {"run": run, "experiment": experiment.digest, "site": site.name, "features": backbone.content}
    write_by_task(path, found, facts)
    return found


def _check_classes(site: Site, rows: Tensor, told: Sequence[int]) -> None:
    policy = site.identity.policy
    if exempt(policy, "statistics"):
        return
    gone = torch.bincount(site.data.y[rows], minlength=max(told) + 1)
    all_of = site.data.counts("train", max(told) + 1)
    for label in told:
        lost, left = int(gone[label]), int(all_of[label] - gone[label])
        name = site.process.registry.classes[label]
        if 0 < lost < policy.min_samples:
            raise PolicyRefusal(
                f"policy.min_samples: class {name!r} would lose fewer than {policy.min_samples} samples, and "
                "their sum tells too much of them; wait until more have gathered"
            )
        if lost and 0 < left < policy.min_samples:
            raise PolicyRefusal(
                f"policy.min_samples: class {name!r} would keep fewer than {policy.min_samples} samples, "
                "whose sum the server could tell by subtracting; withdraw the whole class, or the site"
            )


def _content(row: Tensor) -> bytes:
    return np.ascontiguousarray(row.cpu().numpy()).tobytes()
