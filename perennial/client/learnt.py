"""Which of its records a site has learnt in a run, or had choose or judge something there, by keyed hashes.

A record is known by its content and patient (data/splits.py) under the site's own key, and copies are
counted; simulated sites, among which records may move, share the run's key. So the files say nothing of a
record to whoever lacks the key. Each task has one file, written when the site first trains in it or adds it
up; records that come while a task lasts are trained on and not in it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perennial.client.site import Site
from perennial.client.state import read_safetensors
from perennial.data.site import Part, SiteData
from perennial.data.splits import compute_identities
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.record_key import record_key
from perennial.protocol.stamp import Stamp

FOLDER = "learnt"
PARTS: tuple[Part, ...] = ("train", "validation", "calibration", "test")
NOWHERE = 0
"""The place of a record whose source has no name for it, and the patient where the data name none."""


@dataclass(frozen=True, eq=False)
class Noted:
    """n records. content, place, patient: (n,) int64 keyed hashes; label: (n,) int64; part: of PARTS."""

    content: np.ndarray
    place: np.ndarray
    patient: np.ndarray
    label: np.ndarray
    part: np.ndarray

    def __len__(self) -> int:
        return len(self.content)

    def pick(self, rows: np.ndarray) -> "Noted":
        """The records at rows, (m,) int64 or (n,) bool."""
        return Noted(**{name: values[rows] for name, values in vars(self).items()})

    @classmethod
    def joined(cls, parts: "Sequence[Noted]") -> "Noted":
        """The records of all parts, one part after the other."""
        none = np.empty(0, dtype=np.int64)
        return cls(*(np.concatenate([none, *(vars(part)[name] for part in parts)]) for name in FIELDS))


FIELDS = tuple(Noted.__dataclass_fields__)


def hash_contents(key: bytes, purpose: str, contents: np.ndarray | Sequence[str]) -> np.ndarray:
    """(n,) int64 keyed hashes of contents, (n, 32) uint8, or of texts."""
    found = (each.encode() if isinstance(each, str) else each.tobytes() for each in contents)
    return (
        np.ascontiguousarray(compute_identities(key, f"learnt {purpose}", found)[:, :8])
        .view(np.int64)
        .reshape(-1)
    )


def as_noted(data: SiteData, key: bytes, rows: Tensor) -> Noted:
    """The keyed hashes, labels and parts of the records at rows (n,), whichever part they are in."""
    at, none = rows.cpu().numpy(), np.full(len(rows), NOWHERE)
    part = np.zeros(len(data.y), dtype=np.int64)
    for number, name in enumerate(PARTS):
        part[data.part(name).cpu().numpy()] = number
    named = data.places is not None and data.columns is None
    return Noted(
        hash_contents(key, "content", data.hash_contents(rows)),
        hash_contents(key, "place", [data.places[row] for row in at]) if named and data.places else none,
        hash_contents(key, "patient", data.keyed.groups[at]) if data.patients else none,
        data.y[rows].cpu().numpy(),
        part[at],
    )


def note_learnt(site: Site, stamp: Stamp, rows: Tensor, task: int | None = None) -> None:
    """Note once for each task which records the site trains on or adds up, and which it judges with.

    rows: indices of the records trained on. task: whose records they are; None: the stamp's task. A site that
    joins late gives earlier ones. Does nothing if the task is noted already, or the data are a benchmark's.
    """
    if not site.experiment.data.kind.collected:
        return
    number = task or stamp.task
    path = site.state(stamp.run).folder / FOLDER / f"task-{number:05d}.safetensors"
    if path.exists():
        return
    stop, key = site.process.registry.schedule.list_classes(number).stop, _find_key(site)
    parts = torch.cat([site.data.find_task_indices(part, 0, stop).cpu() for part in PARTS[1:]])
    own = site.state(stamp.run).folder
    # a record may have come from another site where a run goes on; what others note else are copies
    others = [folder for folder in _list_folders(site, stamp) if folder != own]
    before = number if site.experiment.tasks.learnt else 0
    known = Noted.joined([read_noted([own]), read_noted(others, before_task=before)])
    beside = as_noted(site.data, key, parts)
    beside = beside.pick(~match_noted(beside, known.pick(known.part > 0)))
    found = Noted.joined([as_noted(site.data, key, rows), beside])
    make_folder(path.parent)
    # lost with the machine, these records would be trained on once more when the run goes on
    write_notes(path, found)


def find_unlearnt(site: Site, stamp: Stamp) -> Tensor:
    """Indices of training records of earlier classes that no task of the run has learnt, in a continued run.

    Empty in the tasks that the run began with, and for a learner without a memory.
    """
    experiment = site.experiment
    begun_with = experiment.tasks.learnt
    if not begun_with or stamp.task <= begun_with or experiment.learner.memory is None:
        return torch.empty(0, dtype=torch.int64)
    earlier = site.data.find_task_indices("train", 0, site.find_task_range(stamp).start)
    known = read_noted(_list_folders(site, stamp), before_task=stamp.task)
    now = as_noted(site.data, _find_key(site), earlier)
    return earlier[torch.from_numpy(~match_noted(now, known.pick(known.part == 0)))]


def match_noted(now: Noted, known: Noted) -> np.ndarray:
    """(n,) bool: of the rows of one content and patient, as many as were noted; of their own label first.

    So a row hangs on its own noting alone: a copy that comes later was not noted, whoever was.
    """
    found = np.zeros(len(now), dtype=bool)
    for names in (("content", "patient", "label"), ("content", "patient")):
        left = Counter(zip(*(vars(known)[name].tolist() for name in names), strict=True))
        left.subtract(Counter(zip(*(vars(now)[name][found].tolist() for name in names), strict=True)))
        for row, each in enumerate(zip(*(vars(now)[name].tolist() for name in names), strict=True)):
            if not found[row] and left[each] > 0:
                found[row] = True
                left[each] -= 1
    return found


def read_noted(runs: Sequence[Path], before_task: int = 1 << 30) -> Noted:
    """All records noted in these run folders of a site, for tasks below before_task."""
    found = [
        read_notes(path)
        for run in runs
        for path in sorted((run / FOLDER).glob("task-*.safetensors"))
        if int(path.stem.removeprefix("task-")) < before_task
    ]
    return Noted.joined(found)


def read_notes(path: Path) -> Noted:
    """The records noted in one file."""
    return Noted(**{name: values.numpy() for name, values in read_safetensors(path)[0].items()})


def write_notes(path: Path, noted: Noted) -> None:
    """Write one file of notes, and do not wait for the disk."""
    from safetensors.torch import save

    tensors = {name: torch.from_numpy(values.copy()) for name, values in vars(noted).items()}
    replace_file(path, save(tensors), durable=False)


def _find_key(site: Site) -> bytes:
    return record_key(site.identity.state_dir) if site.identity.deployed else site.data.keyed.key


def _list_folders(site: Site, stamp: Stamp) -> list[Path]:
    """Of this site's run; of all sites where a division is simulated, among which records may move."""
    own, shared = site.state(stamp.run).folder, site.identity.shared_models
    if shared is None or site.experiment.data.partition.kind == "natural":
        return [own]
    return sorted(shared.parent.glob(f"*/runs/{own.name}"))
