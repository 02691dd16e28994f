"""The run that a strategy works in: the experiment, the tasks, the server's model and its measures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.schedule import TaskSchedule
from perennial.learning.worth import Scores
from perennial.models.incremental import IncrementalModel
from perennial.privacy.entries import Entry
from perennial.privacy.signed_sums import Signer

if TYPE_CHECKING:
    from perennial.strategies.secure.masked_sums import MaskedSums

Counts = tuple[list[int], list[int]]
"""(right answers, samples) of each class."""


Judge = Callable[[Mapping[str, Tensor], int], Scores]
"""(model, samples at most) -> its answers to the server's own samples."""


class ReleaseRecord(Protocol):
    """Records a protected release before a strategy asks sites for it; see server/releases.py."""

    def asked(self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = "") -> None: ...

    def refused(
        self, number: int, sites: Iterable[str], entries: Sequence[Entry], once: str = ""
    ) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The run that a strategy works in: its experiment, and what the server lends.

    schedule: tasks and their classes. input_shape: of one sample. device: on which the server computes.
    constants: (mean, std) of inputs, if the server knows them.
    load: the server's model with given travelling arrays in it, in evaluation mode; one model serves all
    calls, so a strategy that trains takes a copy.
    measure: counts of given arrays on the server's held-out samples of the classes seen so far; None if
    the server has none.
    judge: the answers of given arrays to at most so many of these samples, the same ones in every call of a
    task; None if the server has none.
    folder: where a strategy may keep a file of its own that a resumed run finds again.
    releases: the server's record of what sites are asked to release; None if nothing is protected.
    secret: of the run, which no site knows; None in simulation, where it is the experiment's seed and every
    site could know it.
    sums: masked sums over the sites, under `secure` alone.
    signers: the signing keys of the sites that sign what they send, as they come.
    """

    experiment: Experiment
    schedule: TaskSchedule
    input_shape: tuple[int, ...]
    device: torch.device
    constants: tuple[Tensor, Tensor] | None
    load: Callable[[Mapping[str, Tensor]], IncrementalModel]
    measure: Callable[[Mapping[str, Tensor]], Counts] | None
    judge: Judge | None = None
    folder: Path | None = None
    releases: ReleaseRecord | None = None
    secret: int | None = None
    sums: "MaskedSums | None" = None
    signers: Mapping[str, Signer] = field(default_factory=dict)

    @property
    def secret_seed(self) -> int:
        """The seed of streams that a site must not foresee: orders, relabelling, buckets, valued sweeps."""
        return self.experiment.seed if self.secret is None else self.secret
