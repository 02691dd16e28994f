"""Records that a site takes back from a finished closed-form run: their part in its sums.

The server subtracts this part. The sums of one record are that record's features, so a withdrawal is refused
until it reaches the policy's floor in every class.
"""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perennial.client.policy import check_answer, check_statistics, find_withheld, is_exempt
from perennial.client.release import pay
from perennial.client.secure_state import own_identity
from perennial.client.site import Site
from perennial.config import charges
from perennial.data.splits import group_by_text
from perennial.foundation.errors import ConfigError, DataError, PolicyRefusal
from perennial.foundation.files import lock_folder, make_folder, replace_file
from perennial.learning.analytic.statistics import Statistics, write_by_task
from perennial.privacy.released import Released
from perennial.privacy.signed_sums import Statement
from perennial.strategies.analytic.site import collect_sums, count_training_samples
from perennial.strategies.analytic.statements import keep_statements, read_statements

WITHDRAWN = "withdrawn-records.json"
"""In the site's folder of a run: statement's hash -> by what the records withdrawn until then are known."""
REPEATED = ("site", "experiment", "settings", "run", "task", "class_order", "features", "signers")
"""What a statement that supersedes another says too."""


def of_patients(site: Site, names: Sequence[str]) -> Tensor:
    """Indices of all records of these patients.

    Raises ConfigError where the data name no patients, DataError naming those who are not in them.
    """
    if not site.data.patients:
        raise ConfigError("--patients: this site's data name no patients; give the records themselves")
    wanted = group_by_text("patient", names)
    known = {group.tobytes() for group in site.data.keyed.groups}
    if strangers := [n for n, group in zip(names, wanted, strict=True) if group.tobytes() not in known]:
        raise DataError(f"--patients: not in this site's data: {', '.join(strangers[:5])}")
    sought = {group.tobytes() for group in wanted}
    rows = [place for place, group in enumerate(site.data.keyed.groups) if group.tobytes() in sought]
    return torch.tensor(rows, dtype=torch.int64)


def of_contents(site: Site, x: Tensor) -> Tensor:
    """Indices of the site's records whose content equals a row of x, (n, ...), not normalised.

    Raises DataError when a row equals none of the site's records.
    """
    own = torch.cat([site.data.part(part) for part in ("train", "validation", "test")])
    indices: dict[bytes, list[int]] = {}
    for index in own.tolist():
        indices.setdefault(_encode_row(site.data.x[index]), []).append(index)
    missing = [row for row in range(len(x)) if _encode_row(x[row]) not in indices]
    if missing:
        raise DataError(
            f"records: {len(missing)} of {len(x)} are not among this site's data (the first: number "
            f"{missing[0] + 1}); allowed: records as the site holds them"
        )
    found = {index for row in x for index in indices[_encode_row(row)]}
    return torch.tensor(sorted(found), dtype=torch.int64)


def write_withdrawn_sums(
    site: Site, run: str, chosen: Tensor, path: Path, current: Mapping[int, str]
) -> dict[int, Statistics]:
    """Write the sums of the chosen records to a file for the server, and charge them; returns them by task.

    chosen: indices of records; a record that is no training sample is in no sum. current: task -> hash of the
    statement of the sums that the server has.
    Raises PolicyRefusal if a class would lose, or keep, fewer samples than the floor; DataError
    if nothing is withdrawn.
    """
    policy, experiment = site.identity.policy, site.experiment
    check_answer(policy, "statistics")
    check_statistics(policy, experiment)
    if experiment.privacy.enabled:
        raise ConfigError(
            "privacy: the sums left with noise; a corrected release needs fresh noise and a new charge"
        )
    backbone, schedule = site.models.load_fixed_features(), site.process.registry.schedule
    found: dict[int, Statistics] = {}
    for task in range(1, schedule.count + 1):
        classes = schedule.list_classes(task)
        rows = _find_summed_rows(site, classes)
        summed = site.data.y[rows].unique().tolist()
        rows = rows[torch.isin(rows, chosen)]
        if len(rows):
            _check_classes(site, rows, summed)
            found[task] = collect_sums(site, backbone, classes, rows)
    if not found:
        raise DataError(
            f"records: none of these {len(chosen)} is a training sample of this run whose sums left the "
            "site; there is nothing to take back"
        )
    pay(site.identity, Released(found, charges.price_clear_release(experiment, run, "statistics")))
    facts = {"run": run, "experiment": experiment.digest, "site": site.name, "features": backbone.content}
    write_by_task(path, found, facts | _sign_remaining(site, run, chosen, found, current))
    return found


def _sign_remaining(
    site: Site, run: str, chosen: Tensor, found: Mapping[int, Statistics], current: Mapping[int, str]
) -> dict[str, Any]:
    """Statements of the sums that remain; {} where the site signed none of these sums.

    Records that were withdrawn before may still be in the data, and are in no remaining sum.
    """
    folder, secret = site.state(run).folder, own_identity(site.identity.state_dir)
    make_folder(folder)
    with lock_folder(folder):
        known, signed = read_statements(folder), list[Statement]()
        marks: dict[str, list[str]] = _read_marks(folder)
        chosen_marks = {_mark(site, row, secret) for row in chosen.tolist()}
        for task in found:
            former = next((s for s in known.get(task, ()) if s.sha256 == current.get(task)), None)
            if former is None:
                return {}
            gone = chosen_marks | set(marks.get(former.sha256, ()))
            classes = site.process.registry.schedule.list_classes(task)
            rows = _find_summed_rows(site, classes).tolist()
            left = torch.tensor([r for r in rows if _mark(site, r, secret) not in gone], dtype=torch.int64)
            remaining = collect_sums(site, site.models.load_fixed_features(), classes, left)
            same = {name: getattr(former, name) for name in REPEATED}
            signed.append(Statement.make(secret, known[task], remaining.sha256, former, **same))
            marks[signed[-1].sha256] = sorted(gone)
        replace_file(folder / WITHDRAWN, json.dumps(marks).encode())
        keep_statements(folder, signed)
    return {"statements": list(map(asdict, signed))}


def _read_marks(folder: Path) -> dict[str, list[str]]:
    path = folder / WITHDRAWN
    return json.loads(path.read_bytes()) if path.exists() else {}


def _mark(site: Site, row: int, secret: bytes) -> str:
    """By which a withdrawn record is known again here; the key is the site's own."""
    return hmac.digest(secret, _encode_row(site.data.x[row]), "sha256").hex()


def _find_summed_rows(site: Site, classes: range) -> Tensor:
    """Indices of the training samples that are in this site's sums of these classes."""
    counts = count_training_samples(site, classes)
    stay = find_withheld(site.identity.policy, "statistics", counts)
    summed = [label for index, label in enumerate(classes) if counts[index] and index not in stay]
    rows = site.data.find_task_indices("train", classes.start, classes.stop)
    return rows[torch.isin(site.data.y[rows], torch.tensor(summed, dtype=torch.int64))]


def _check_classes(site: Site, rows: Tensor, summed: Sequence[int]) -> None:
    """Raises PolicyRefusal if what a class loses or keeps is below the floor. summed: classes with a sum."""
    policy = site.identity.policy
    if is_exempt(policy, "statistics"):
        return
    gone = torch.bincount(site.data.y[rows], minlength=max(summed) + 1)
    all_of = site.data.counts("train", max(summed) + 1)
    for label in summed:
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


def _encode_row(row: Tensor) -> bytes:
    return np.ascontiguousarray(row.cpu().numpy()).tobytes()
