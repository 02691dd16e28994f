"""Blocks about rounds: who takes part, when a task ends, and what is measured."""

import operator
from typing import Literal

from pydantic import Field, model_validator

from perennial.foundation.block import Block
from perennial.foundation.errors import ConfigError

_WITHOUT = operator.not_
JOIN_SECONDS = 600.0


class RoundsConfig(Block):
    """Who takes part in a round, and how long the server waits."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the connected sites that is asked in each round."""
    quorum: int = Field(default=1, ge=1)
    """Valid replies without which a round does not count: the model stays as it was."""
    deadline: float = Field(default=3600.0, gt=0)
    """Seconds after which a round goes on without the sites that have not answered. The server waits as long,
    and no longer than JOIN_SECONDS, for sites to connect, and for a quorum of them to come back."""
    wait_for: int | None = Field(default=None, ge=1)
    """Sites that must be connected before the run starts; default: all of them in simulation, 1 otherwise."""
    max_skipped: int = Field(default=3, ge=1)
    """Attempts in a row without a quorum after which a simulation ends with an error (it can be resumed) and
    a deployed run rests. The round is asked again: none of those planned is used up."""

    @property
    def join_seconds(self) -> float:
        """Seconds to wait for sites that are not connected."""
        return min(self.deadline, JOIN_SECONDS)


class PretrainingConfig(Block):
    """Rounds of plain averaging before the first task, after which the experiment's own strategy takes over.

    Hu et al. 2022 (Appl. Sci. 12(19):10025), who give neither number.
    """

    samples: int = Field(default=64, ge=1)
    """Training samples that each site uses, its classes of task 1 as evenly as it has them."""
    rounds: int = Field(default=3, ge=1)
    """Rounds that come before those of task 1."""
    exclude: bool = False
    """Leave these samples out of the rest of task 1, as the paper does."""

    def require(self, site: str, available: int) -> None:
        """Raises ConfigError when a site has fewer samples of task 1 than pre-training asks of each."""
        if available < self.samples:
            raise ConfigError(
                f"pretraining.samples: found {self.samples}, but site {site!r} has {available} training "
                "samples of task 1; allowed at most the number at the smallest site"
            )
        if self.exclude and available == self.samples:
            raise ConfigError(
                f"pretraining.exclude: site {site!r} has no sample of task 1 but the {available} of "
                "pretraining.samples; allowed with fewer of them"
            )


class PointConfig(Block):
    """What an operating point keeps on calibration samples: one of the two.

    sensitivity: the share of the class's samples that reach it. specificity: of the others' that do not.
    """

    sensitivity: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False, exclude_if=_WITHOUT)
    specificity: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False, exclude_if=_WITHOUT)

    @model_validator(mode="before")
    @classmethod
    def _says_which(cls, found: object) -> object:
        if not isinstance(found, dict) or len(found) != 1:
            raise ValueError("allowed one of {sensitivity: 0.95} and {specificity: 0.95}")
        return found

    @property
    def asked(self) -> float:
        """The share."""
        return self.sensitivity or self.specificity or 0.0

    @property
    def by(self) -> Literal["sensitivity", "specificity"]:
        """Which of the two it is."""
        return "specificity" if self.sensitivity is None else "sensitivity"


class EvaluationConfig(Block):
    """When and where the model is measured."""

    every: Literal["task", "round"] = "task"
    central: bool = True
    """On the server's test set, where it has one."""
    federated: bool = True
    """At the sites, on their held-out samples, at the end of each task."""
    measures: bool = True
    """Beside right answers, the tables of which sensitivity, AUROC, calibration and more are made; a site
    sends its own if its policy answers measures, and none sends any with noise."""
    coverage: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False, exclude_if=_WITHOUT)
    """Make prediction sets that hold the true class with
    this probability; needs data.calibration_fraction."""
    operating_points: dict[str, PointConfig] = Field(default_factory=dict, exclude_if=_WITHOUT)
    """Class -> {sensitivity: S} or {specificity: S}: choose the probability from which the class is reported
    so that it is kept on calibration samples, and say both on the judged ones."""
    noise_multiplier: float | None = Field(
        default=None, gt=0, lt=float("inf"), allow_inf_nan=False, exclude_if=_WITHOUT
    )
    """With a protection: noise on each count of right and wrong answers, for the unit that privacy hides; its
    standard deviation over what one unit moves them by, which is 1 for a sample or a patient."""
    clip_counts: float | None = Field(
        default=None, ge=1, lt=float("inf"), allow_inf_nan=False, exclude_if=_WITHOUT
    )
    """With noise, in the modes that hide a whole site: the L2 norm to which a site's counts are shrunk, about
    the number of samples that it counts for."""


class AbsenceConfig(Block):
    """One stretch of rounds in which a site does not answer; for simulation."""

    site: str
    first_round: int = Field(ge=1)
    last_round: int | None = Field(default=None, ge=1)
    """None: for good."""

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> "AbsenceConfig":
        if self.last_round is not None and self.last_round < self.first_round:
            raise ValueError(
                f"last_round: found {self.last_round}, allowed from first_round, {self.first_round}"
            )
        return self


AdversaryKind = Literal["free_rider", "label_flip"]


class AdversaryConfig(Block):
    """A site that cheats in every round; for simulation."""

    site: str
    kind: AdversaryKind
    """free_rider: returns the model as it came. label_flip: trains with every class called another one."""
