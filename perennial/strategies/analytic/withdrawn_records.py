"""Records that a site takes back from a finished closed-form run: their part in its sums.

The server subtracts this part. The sums of one record are that record's features, so a withdrawal is refused
until it reaches the policy's floor in every class, and so does what the server can tell from several files.
"""

import hmac
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.policy import check_answer, check_statistics
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
from perennial.strategies.analytic.site import collect_sums, find_summed_rows
from perennial.strategies.analytic.statements import keep_statements, read_statements

WITHDRAWN = "withdrawn-records.json"
"""In the site's folder of a run: statement's hash -> marks of the records withdrawn until then; and of each
file that was made, whether it was sent or not, FILE and a number -> class and mark of each of its samples."""
FILE = "file "
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
    folder, secret = site.state(run).folder, own_identity(site.identity.state_dir)
    make_folder(folder)
    with lock_folder(folder):
        known, marks = read_statements(folder), _read_marks(folder)
        going = {_mark(site, row, secret) for row in chosen.tolist()}
        parts: dict[int, Part] = {}
        for task in range(1, schedule.count + 1):
            rows = find_summed_rows(site, backbone, schedule.list_classes(task))
            former = next((s for s in known.get(task, ()) if s.sha256 == current.get(task)), None)
            before = set(marks.get(former.sha256, ())) if former is not None else set[str]()
            part = Part(former, rows, [_mark(site, row, secret) for row in rows.tolist()], before, going)
            if len(part.gone):
                parts[task] = part
        if not parts:
            raise DataError(
                f"records: none of these {len(chosen)} is a training sample of this run whose sums left the "
                "site, or all were taken back before; there is nothing to take back"
            )
        marks[f"{FILE}{len(marks)}"] = _check_floor(site, parts.values(), marks)
        found = {
            task: collect_sums(site, backbone, schedule.list_classes(task), part.gone)
            for task, part in parts.items()
        }
        pay(site.identity, Released(found, charges.price_clear_release(experiment, run, "statistics")))
        signed = list[Statement]()
        for task, part in parts.items():
            if part.former is None:
                # where the site signed none of these sums, no statement can say what remains
                signed.clear()
                break
            remaining = collect_sums(site, backbone, schedule.list_classes(task), part.left)
            same = {name: getattr(part.former, name) for name in REPEATED}
            signed.append(Statement.make(secret, known[task], remaining.sha256, part.former, **same))
        marks |= {each.sha256: sorted(parts[each.task].before | going) for each in signed}
        # before the file is there: what may have left is known here
        replace_file(folder / WITHDRAWN, json.dumps(marks).encode())
        keep_statements(folder, signed)
    facts = {"run": run, "experiment": experiment.digest, "site": site.name, "features": backbone.content}
    write_by_task(path, found, facts | ({"statements": list(map(asdict, signed))} if signed else {}))
    return found


@dataclass(frozen=True)
class Part:
    """One task's part in a withdrawal.

    former: the statement of the sums that the server has; None: the site signed none. rows: (n,) indices of
    the samples in the sums that left first. marks: of each of them. before: marks of what those that the
    server has contain no more; such a record may still be in the data. going: marks of what goes now.
    """

    former: Statement | None
    rows: Tensor
    marks: Sequence[str]
    before: Set[str]
    going: Set[str]

    @property
    def gone(self) -> Tensor:
        """Indices of the samples that go now."""
        return self._pick(self.going - self.before)

    @property
    def left(self) -> Tensor:
        """Indices of the samples in the sums that remain."""
        return self._pick(set(self.marks) - self.going - self.before)

    def _pick(self, marks: Set[str]) -> Tensor:
        return self.rows[torch.tensor([mark in marks for mark in self.marks], dtype=torch.bool)]

    def describe(self, site: Site, rows: Tensor) -> list[str]:
        """Class and mark of each of these rows, in one text each."""
        of = dict(zip(self.rows.tolist(), self.marks, strict=True))
        return [f"{int(site.data.y[row])} {of[row]}" for row in rows.tolist()]


def _check_floor(site: Site, parts: Collection[Part], marks: Mapping[str, Sequence[str]]) -> list[str]:
    """What this file takes out, as it is kept for later ones.

    Samples of a class that are in the same files form a group. Whatever the server adds and subtracts, it
    gets sums over whole groups, so each must reach the floor. Which files the server has, it alone knows: all
    that were made count. Raises PolicyRefusal below the floor.
    """
    now = [text for part in parts for text in part.describe(site, part.gone)]
    files = [Counter(texts) for key, texts in marks.items() if key.startswith(FILE)] + [Counter(now)]
    samples = Counter(text for part in parts for text in part.describe(site, part.rows))
    for file in files:
        # some may be in the data no more
        samples |= file
    touched, groups = {text.partition(" ")[0] for text in now}, Counter[tuple[str, tuple[bool, ...]]]()
    for text, count in samples.items():
        if (label := text.partition(" ")[0]) in touched:
            groups[label, tuple(text in file for file in files)] += count
    floor = site.identity.policy.min_samples
    for (label, inside), count in groups.items():
        if count >= floor:
            continue
        name = site.process.registry.classes[int(label)]
        if inside[-1]:
            raise PolicyRefusal(
                f"policy.min_samples: class {name!r} would lose fewer than {floor} samples, or fewer that no "
                "earlier file has, and their sum tells too much of them; wait until more have gathered"
            )
        raise PolicyRefusal(
            f"policy.min_samples: class {name!r} would keep fewer than {floor} samples, or fewer that an "
            "earlier file has and this one lacks, whose sum the server could tell by subtracting; withdraw "
            "the whole class, or the site"
        )
    return now


def _read_marks(folder: Path) -> dict[str, list[str]]:
    path = folder / WITHDRAWN
    return json.loads(path.read_bytes()) if path.exists() else {}


def _mark(site: Site, row: int, secret: bytes) -> str:
    """By which a withdrawn record is known again here: its content and patient, under the site's own key."""
    patient = site.data.keyed.groups[row].tobytes() if site.data.patients else b""
    return hmac.digest(secret, _encode_row(site.data.x[row]) + patient, "sha256").hex()


def _encode_row(row: Tensor) -> bytes:
    return np.ascontiguousarray(row.cpu().numpy()).tobytes()
