"""Blocks about rounds: who takes part, when a task ends, what is measured, and how much a site counts."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from perennial.foundation.errors import ConfigError
from perennial.foundation.plain import Block

if TYPE_CHECKING:
    pass

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
    def _require_one(cls, found: object) -> object:
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
    def _check_order(self) -> "AbsenceConfig":
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


MAX_SAMPLES = 1 << 20
"""A site that says it trained on more samples counts as if it had said this."""
WINDOW = 10
"""Former rounds that count."""
SHARE = 1 / 2
"""With a norm_multiple no site counts for more than all others together."""
LEAST_SITES = 4
"""Sites from which on a share of samples is bounded."""
CLOSED_FORM = ("registered", "share")
"""Keys that mean something where sites send sums."""
FORMER_MULTIPLE = 3.0
"""The default norm_multiple of 0.2.0, whose stored experiments name it in closed form too."""


class BoundsConfig(Block):
    """Bounds on what a site claims and sends; the journal names each site that met one.

    `norm_multiple: 3` turns on the bounds of norms and of shares; without a line no honest site is touched.
    They follow from former rounds; a run's first round takes its own replies for them. The norm's multiple is
    of the largest median: a task in which most sites hold next to nothing must not stop the few that do.
    """

    registered: dict[str, int] = Field(default_factory=dict)
    """Samples that single sites count for at most, from their registration; where sites send updates, in the
    place of `share`."""
    norm_multiple: float | None = Field(default=None, ge=1)
    """An update may be so many times as long as the median one; null: no bound. A longer one is scaled down.
    SCAFFOLD, FedDyn and AdaBest drop it: what a site remembers has to agree with what the server folded."""
    share: float | None = Field(default=None, gt=0, le=1)
    """The share of all samples that one site counts for at most; 1: no bound.

    null: SHARE where norm_multiple is set, else no bound. It holds from four sites on, in sums for each task.
    """

    @property
    def most_share(self) -> float:
        """Largest share of all samples that one site counts for, where sites send updates."""
        if self.share is None:
            return 1.0 if self.norm_multiple is None else SHARE
        return self.share

    @property
    def in_words(self) -> str:
        """What the bounds allow, as a sentence; '' where none is set."""
        said = []
        if self.norm_multiple is not None:
            said.append(f"an update above {self.norm_multiple:g} times the median norm is scaled down to it")
        if self.most_share < 1:
            said.append(f"a site counts for at most {self.most_share:.0%} of all samples")
        if self.registered:
            said.append("registered sites count for at most what they registered with")
        return "; ".join(said)

    def require_fit(self, closed_form: bool) -> None:
        """Raises ValueError naming a key that would do nothing. closed_form: whether sites send sums."""
        here = CLOSED_FORM if closed_form else type(self).model_fields.keys()
        for key, field in type(self).model_fields.items():
            found = getattr(self, key)
            if key == "norm_multiple" and found == FORMER_MULTIPLE:
                continue
            if key not in here and found != field.get_default(call_default_factory=True):
                raise ValueError(
                    f"bounds.{key}: found {found}, which does nothing: strategy analytic has sums and no "
                    f"updates; allowed: {', '.join(CLOSED_FORM)}"
                )


PARTS = 1024
"""A site's records count in whole parts of so many, so that scaled sums stay exact."""


def compute_level(counts: Sequence[int], share: float) -> float:
    """The count to which larger sites are cut, so that none of the K has more than `share` of all.

    With n falling, it is s sum_{i>m} n_i / (1 - m s) for the least m < 1/s with n_{m+1} at most that.
    Infinite if no such count exists: fewer than 1/s sites have records.
    """
    falling = sorted((n for n in counts if n > 0), reverse=True)
    above = 0
    while above * share < 1 and above < len(falling):
        found = share * sum(falling[above:]) / (1 - above * share)
        if falling[above] <= found:
            return found
        above += 1
    return math.inf


def compute_parts_by_share(counts: Sequence[int], share: float) -> list[int]:
    """(K,) weights of the sites' sums in units of 1/PARTS: floor(PARTS level / n), from 1 to PARTS."""
    most = compute_level(counts, share)
    return [PARTS if n <= most else max(1, int(PARTS * most / n)) for n in counts]


def compute_parts_by_registration(counts: Mapping[str, int], registered: Mapping[str, int]) -> dict[str, int]:
    """site -> weight of its sums in units of 1/PARTS: it counts as no more records than it registered."""
    return {
        site: PARTS if (most := registered.get(site)) is None or n <= most else max(1, PARTS * most // n)
        for site, n in counts.items()
    }
