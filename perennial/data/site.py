"""What one site holds, simulated or real: indices in a tensor of samples, divided into three parts."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perennial.data.splits import KeyedHash, Purpose, group_by_content, record_contents

Part = Literal["train", "validation", "calibration", "test"]
NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class SiteData:
    """One site's samples, divided into training, validation and test samples.

    x: all samples, uint8 (N, C, H, W) or float32; simulated sites share it.
    y: (N,) internal labels.
    train, validation, calibration, test: sorted int64 indices of this site's samples in x and y, disjoint.
    Calibration samples serve the thresholds of prediction sets and nothing else.
    mean, std: (C,) or (D,) float32 of (x - mean) / std, after 8-bit images are scaled to 0..1.
    keyed: by which samples were divided, and are chosen as exemplars.
    columns: of a table, feature column -> "numeric", "date" or its categories.
    fill: (D,) what stands for its missing numbers; None: the mean.
    notes: what a person should know about this data.
    patients: whether the data name each sample's patient.
    subgroup: (N,) int64 index into data.subgroup.values, -1 for another value; None without data.subgroup.
    contents: (N, 32) uint8 of record_identity.record_contents, for data of a site's own; None elsewhere.
    places: (N,) where each record was read; None where the source has no name for it.
    """

    name: str
    x: Tensor
    y: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor
    mean: Tensor
    std: Tensor
    keyed: KeyedHash
    columns: Mapping[str, str | Sequence[str]] | None = None
    notes: tuple[str, ...] = ()
    patients: bool = False
    fill: Tensor | None = None
    calibration: Tensor = NOTHING
    subgroup: np.ndarray | None = None
    contents: np.ndarray | None = None
    places: tuple[str, ...] | None = None
    _of_tasks: dict[tuple[Part, int, int], Tensor] = field(default_factory=dict, init=False, repr=False)
    """What task_indices found, which every round of a task asks for."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of images, (D,) of tables."""
        return tuple(self.x.shape[1:])

    def hash_contents(self, rows: Tensor) -> np.ndarray:
        """(n, 32) uint8 content hashes (record_identity.record_contents) of the records at rows."""
        if self.contents is not None:
            return self.contents[rows.cpu().numpy()]
        return record_contents(self.x[rows], self.columns)

    def part(self, part: Part) -> Tensor:
        """Indices of the samples of one part."""
        indices: Tensor = getattr(self, part)
        return indices

    def find_task_indices(self, part: Part, low: int, high: int) -> Tensor:
        """Indices of the samples of one part whose internal label is in low .. high - 1."""
        asked = part, low, high
        if asked not in self._of_tasks:
            indices = self.part(part)
            labels = self.y[indices]
            self._of_tasks[asked] = indices[(labels >= low) & (labels < high)]
        return self._of_tasks[asked]

    def counts(self, part: Part, num_classes: int) -> Tensor:
        """(num_classes,) int64 number of samples in one part, for classes 0 .. num_classes - 1."""
        return torch.bincount(self.y[self.find_task_indices(part, 0, num_classes)], minlength=num_classes)

    def choose_one_per_patient(self, rows: Tensor, purpose: Purpose = "counts") -> Tensor:
        """(p,) of the rows, one for each patient: the one whose content has the lowest keyed hash.

        The choice for one patient does not depend on other patients.
        """
        if len(rows) == 0:
            return rows
        patients = self.keyed.number_groups(rows).numpy()
        contents = KeyedHash(self.keyed.key, group_by_content(self.x[rows]))
        order = np.lexsort((contents.values(purpose, np.arange(len(rows))), patients))
        _, first = np.unique(patients[order], return_index=True)
        return rows[torch.from_numpy(np.sort(order[first]))]

    def sample_hash(self, place: int) -> str:
        """sha256 (hex) of the raw bytes of the sample at index `place`, by which it is found again."""
        return hashlib.sha256(self.x[place].cpu().contiguous().numpy().data).hexdigest()

    def fingerprint(self, part: Part, classes: Sequence[str]) -> str:
        """sha256 (hex) of one part's records and class names, in any order. classes: names by label."""
        rows = self.part(part)
        labels = self.y[rows].tolist()
        groups = self.keyed.groups[rows.cpu().numpy()]
        found = sorted(
            group.tobytes() + classes[int(label)].encode()
            for group, label in zip(groups, labels, strict=True)
        )
        return hashlib.sha256(b"\0".join(found)).hexdigest()
