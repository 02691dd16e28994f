"""The gate between a new model and patients: it must be as good as the approved one, up to a margin.

Both models answer for the same records. For each class, each site and each subgroup the difference between
the shares that they classify correctly has the 95 % score interval for paired shares (Tango 1998, Statistics
in Medicine 17, 891). A part is shown to be as good if the lower end lies above minus its margin, a one-sided
test at 2.5 %. Every part must be shown to be, so that many parts need no correction: a model that is worse by
the margin in any one of them passes with at most the chance of that one test (intersection-union; Berger
1982). Records of one patient count as one: the patient's shares of lost and of gained answers.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from perennial.foundation.errors import ConfigError, StateError, suggest_nearest
from perennial.foundation.files import make_folder, replace_file
from perennial.server.measures.record import Figure, Z

Kind = Literal["class", "site", "subgroup"]
DISCORDANT, POWER = 0.1, 0.8416
"""Share of records that two equally good models are taken to answer differently, and the standard normal
quantile of the power (80 %) with which the gate should pass them."""
DRAWS = 100_000
VERDICTS = "gate.jsonl"
"""In a folder below RUN/evaluations; a line for each verdict, and none is ever taken out."""
HEADING = "## Judged against an approved model"
STEPS = 60
"""Halvings of an interval: 2^-60 of its width is left."""


@dataclass(frozen=True)
class Part:
    """One class, site or subgroup. units: patients, or records if the data name no patients.

    lost, gained: units classified correctly by the approved model alone, and by the new one alone.
    """

    kind: Kind
    name: str
    units: int
    lost: float
    gained: float
    margin: float

    @property
    def difference(self) -> Figure:
        """Share classified correctly by the new model minus that of the approved one."""
        return compute_paired_difference(self.lost, self.gained, self.units)

    @property
    def needed(self) -> int:
        """The fewest units with which two equal models can be shown to be equal within the margin."""
        return estimate_records_needed(self.margin)[0]

    @property
    def probability(self) -> float:
        """Posterior probability that the new model loses less than the margin.

        Of the shares lost, gained and alike, under Jeffreys' prior, by draws of one fixed stream. Few units
        give a figure too, which says how sure they make one; the verdict is the interval's.
        """
        counts = [self.lost, self.gained, max(0.0, self.units - self.lost - self.gained)]
        drawn = np.random.default_rng(0).dirichlet([count + 0.5 for count in counts], DRAWS)
        return float((drawn[:, 0] - drawn[:, 1] < self.margin).mean())

    @property
    def passes(self) -> bool:
        """Whether the new model was shown to be worse by less than the margin."""
        low = self.difference.low
        return low is not None and low > -self.margin

    def __str__(self) -> str:
        said, within = self.difference, f"margin {100 * self.margin:g}"
        if said.value is None or said.low is None or said.high is None:
            return f"{self.kind} {self.name}: no record, {within}"
        text = (
            f"{self.kind} {self.name}: {100 * said.value:+.1f} points [{100 * said.low:+.1f}, "
            f"{100 * said.high:+.1f}] of {self.units}, {within}; within it with probability "
            f"{min(self.probability, 0.9999):.4g}"
        )
        return text + (f"; at least {self.needed} are needed" if self.units < self.needed else "")


@dataclass(frozen=True)
class Verdict:
    """The gate's verdict. parts: all that were compared. new: classes that the approved model lacks."""

    parts: tuple[Part, ...]
    new: tuple[str, ...] = ()

    @cached_property
    def failing(self) -> tuple[Part, ...]:
        """Parts that were not shown to be as good."""
        return tuple(part for part in self.parts if not part.passes)

    @property
    def passes(self) -> bool:
        """Whether every part was shown to be as good, and there was any."""
        return bool(self.parts) and not self.failing


def estimate_records_needed(margin: float) -> tuple[int, int]:
    """(fewest units, usual number of units) with which the gate can pass two equally good models.

    The fewest are those on which both answer alike throughout; the usual number passes with 80 % where they
    differ on DISCORDANT of the records.
    """
    # the variance under a loss of the margin, as _score() estimates it, and that of equally good models
    b = 2 * margin + DISCORDANT
    share = (math.sqrt(b * b - 4 * DISCORDANT * margin * (1 + margin)) + b) / 4
    at_margin = 2 * share - margin * (1 + margin)
    usual = ((Z * math.sqrt(at_margin) + POWER * math.sqrt(DISCORDANT)) / margin) ** 2
    fewest = math.floor(Z * Z * (1 - margin) / margin) + 1
    return fewest, max(fewest, math.ceil(usual))


def compare(
    right: tuple[np.ndarray, np.ndarray],
    groups: Sequence[tuple[Kind, str, np.ndarray]],
    margins: Mapping[str, float],
    patients: np.ndarray | None,
) -> tuple[Part, ...]:
    """Compare both models' answers in each part.

    right: (n,) bool of the approved and of the new model. groups: kind, name, (n,) bool who is in it.
    margins: as read_margins. patients: (n,) int64, each record's patient; None: each record is a unit.
    """
    approved, new = right
    lost, gained = approved & ~new, new & ~approved
    found = []
    for kind, name, members in groups:
        whose = np.arange(members.sum()) if patients is None else patients[members]
        _, unit, records = np.unique(whose, return_inverse=True, return_counts=True)
        gone, come = (
            float((np.bincount(unit, each[members], len(records)) / records).sum()) for each in (lost, gained)
        )
        found.append(Part(kind, name, len(records), gone, come, margins.get(name, margins[""])))
    return tuple(found)


def read_margins(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Parse margins into name of a part -> share; '' is that of all others.

    texts: NUMBER, and NAME=NUMBER for a class, site or subgroup. Raises ConfigError naming what is wrong.
    """
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            margin = float(number)
        except ValueError:
            margin = math.nan
        if not 0 < margin <= 1:
            raise ConfigError(
                f"--margin: found {text!r}, allowed a share above 0 and at most 1, as in 0.05 or NAME=0.2"
            )
        if name and name not in names:
            raise ConfigError(
                f"--margin: {name!r} is no class, site or subgroup here{suggest_nearest(name, names)}"
            )
        found[name] = margin
    if "" not in found:
        raise ConfigError("--margin: missing; how much worse may the new model be? A share, as in 0.05")
    return found


def compute_paired_difference(lost: float, gained: float, units: float) -> Figure:
    """The difference (gained - lost) / units of two shares of the same units, with its score interval."""
    if units <= 0:
        return Figure()
    value = (gained - lost) / units
    low = _find_root(lambda difference: _score(lost, gained, units, difference) - Z, -1.0, value)
    high = _find_root(lambda difference: _score(lost, gained, units, difference) + Z, value, 1.0)
    return Figure(value=value, low=low, high=high)


def _score(lost: float, gained: float, units: float, difference: float) -> float:
    """How far off a true difference is, in standard errors under it; falls as the difference grows."""
    b = 2 * units * difference - lost - gained + (lost - gained) * difference
    c = -lost * difference * (1 - difference)
    # the constrained estimate of the share that is lost, whose quadratic has one root that is a share
    share = (math.sqrt(max(0.0, b * b - 8 * units * c)) - b) / (4 * units)
    if difference > 0:
        # the other way round the same estimate loses no digits
        return -_score(gained, lost, units, -difference)
    variance = units * (2 * share + difference * (1 - difference))
    distance = gained - lost - units * difference
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def _find_root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is 0, between low and high; the end that is nearer where it is nowhere."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def note_verdict(run: Path, evaluation: Path, text: str, card: Path) -> None:
    """Append a verdict to those in an evaluation's folder, and put all verdicts of the run into its card.

    evaluation: below RUN/evaluations; made if missing.
    """
    make_folder(evaluation, mode=0o755)
    path = evaluation / VERDICTS
    before = path.read_bytes() if path.exists() else b""
    replace_file(path, before + json.dumps({"text": text}).encode() + b"\n", mode=0o644)
    content = card.read_text(encoding="utf-8") if card.exists() else "# Model card\n"
    others = re.sub(rf"(?ms)^{HEADING}\n.*?(?=^## |\Z)", "", content).rstrip()
    title, _, rest = others.partition("\n")
    parts = [title, write_verdicts(run), rest.strip()]
    replace_file(card, ("\n\n".join(filter(None, parts)) + "\n").encode(), mode=0o644)


def write_verdicts(run: Path) -> str:
    """Every verdict in a run's folder, in Markdown; '' without one. Raises StateError on a damaged file."""
    lines = []
    for path in sorted(run.glob(f"evaluations/*/{VERDICTS}")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                text = str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(f"{path}, line {number}: damaged; expected a verdict") from error
            # intervals keep their brackets; a closing one before another or ( would make a link
            lines.append("- " + re.sub(r"([\\<>`*_|]|\](?=[(\[]))", r"\\\1", text))
    return f"{HEADING}\n\n" + "\n".join(lines) if lines else ""
