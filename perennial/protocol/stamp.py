"""What messages repeat: the stamp of their round, and the bounds of what their fields may hold.

Both sides refuse a message whose stamp shows that it is stale or of another run.
"""

from dataclasses import dataclass
from typing import Any

from perennial.foundation.errors import ProtocolError
from perennial.foundation.names import SITE_NAME_RULE, is_site_name
from perennial.protocol.fields import WireMessage, bounded, hexadecimal, matching
from perennial.protocol.tensors import Tensors

VERSION = 3
MAX_TASKS = 10_000
MAX_CLASSES = 1_000_000
LONGEST_REASON, LONGEST_SETTINGS, LONGEST_METRICS = 4_000, 2**20, 2**24
"""Characters. Counts of a million classes fit the last."""
LONGEST_ROW = 200
MAX_EXAMPLES = 100_000_000
CLASS_WEIGHT = 1 << 20
"""The largest weight of a class in class-balanced statistics: that of a class with one sample."""
RUN_TOKEN = 16
SPLIT_KEY = 64
SHA256 = 64
KEY = 64
SIGNATURE = 128
"""Hexadecimal digits. A run's token and a model's hash name files at the site, so nothing
else may stand there."""
STAMP_FIELDS = ("run", "experiment", "class_order", "split_key", "task", "round", "num_classes")


@dataclass(frozen=True, kw_only=True)
class Stamp(WireMessage):
    """Fields that every request and reply about training repeats: run, experiment, task and round.

    own_record: the site answers from a record of its own, once for a task.
    own_noise: noise of its own hides the reply, and not the experiment's privacy.mode.
    """

    own_record = False
    own_noise = False
    run: str = hexadecimal(RUN_TOKEN)
    """Token of the run, drawn when it was first started; a resumed run keeps it."""
    experiment: str = hexadecimal(SHA256)
    """SHA-256 of the experiment's resolved settings."""
    class_order: str = hexadecimal(SHA256)
    """SHA-256 of the class names in the order of the registry."""
    split_key: str = hexadecimal(SPLIT_KEY, default="")
    """Key of the run by which sites with data of their own divide them into training, validation and test
    samples; drawn when the run was first started. Simulated sites take one that follows from the seed."""
    task: int = bounded(1, MAX_TASKS)
    """Task that the message belongs to, from 1."""
    round: int = bounded(0)
    """Round since the start of the run, from 1; 0 outside training."""
    num_classes: int = bounded(1, MAX_CLASSES)
    """Classes known in this task: rows of the classifier."""

    def find_mismatch(self, other: "Stamp") -> str:
        """The first field in which another stamp differs, with both values; '' if none does."""
        theirs = other.stamp_fields
        for name, value in self.stamp_fields.items():
            if theirs[name] != value:
                return f"{name}: found {theirs[name]!r:.20}, expected {value!r:.20}"
        return ""

    @property
    def models(self) -> int:
        """Number of models whose right answers a request asks for, if it asks for any."""
        return 1

    @property
    def stamp_fields(self) -> dict[str, Any]:
        """The stamp's fields, to build another message of the same round."""
        return {name: getattr(self, name) for name in STAMP_FIELDS}


@dataclass(frozen=True, kw_only=True)
class Maskable(Stamp):
    """Fields of a request whose answer is one part of a masked sum; all are None otherwise."""

    attempt: int | None = bounded(1, default=None)
    """Number of the attempt at this sum; it grows over the run, and no site takes part in one twice."""
    roster: list[str] | None = matching(is_site_name, SITE_NAME_RULE, default=None)
    """Sites that send masked values in this attempt, in ascending order."""
    roster_masks: list[str] | None = hexadecimal(KEY, default=None)
    """The fresh public mask key of each."""
    roster_commitments: list[str] | None = hexadecimal(SHA256, default=None)
    """For each site, a hash of the seed of its self mask, which does not reveal the seed."""
    roster_signatures: list[str] | None = hexadecimal(SIGNATURE, default=None)
    """Each site's signature over its two values, the attempt and its peers."""

    @property
    def sum_updates(self) -> int:
        """Number of sites that the grid of this sum has room for."""
        return len(self.roster or ())


@dataclass(frozen=True, kw_only=True)
class NeedsPrevious(Stamp):
    """Fields of a request whose answer needs the model of the task before."""

    previous: str = hexadecimal(SHA256, default="")
    """SHA-256 of the global model at the end of the task before (the teacher); '' in task 1."""
    previous_arrays: Tensors | None = None
    """That model itself, for a site that is not known to hold it."""


def require_same_round(expected: Stamp, found: Stamp) -> None:
    """Check that `found` has the experiment, task, round and class order of `expected`.

    Raises ProtocolError naming the first field that differs.
    """
    difference = expected.find_mismatch(found)
    if difference:
        raise ProtocolError(f"{type(found).__name__}: stale or foreign message: {difference}")
