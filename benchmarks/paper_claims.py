"""What a paper claims of two rows of a table, and whether our figures bear it out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal, cast

from benchmarks.intervals import LEAST_SEEDS, Interval, holm, t_interval

Word = Literal["holds", "does not hold", "undecided", "not measured"]
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Claim:
    """`better` exceeds `worse` in `measure` by more than `margin` percentage points.

    text: the claim in the paper's terms, with its source. better, worse: labels of two rows. lower: smaller
    values of the measure are better, as with forgetting.
    """

    text: str
    better: str
    worse: str
    measure: str
    margin: float = 0.0
    lower: bool = False

    def differences(self, runs: Runs) -> list[float]:
        """Better minus worse, seed by seed, in points; worse minus better where lower is better.

        Seeds decide data and initial weights, so a difference within a seed is free of what they do alike.
        """
        better, worse = (
            {run["seed"]: run for run in runs if run["row"] == row} for row in (self.better, self.worse)
        )
        sign = -1 if self.lower else 1
        found = [
            100 * sign * (better[seed]["measures"][self.measure] - worse[seed]["measures"][self.measure])
            for seed in sorted(better.keys() & worse.keys())
        ]
        return [difference for difference in found if not isnan(difference)]


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in our figures.

    The claim holds when the whole corrected interval is above its margin and does not hold when the whole
    interval is below; else, and with fewer than five seeds, it is undecided.

    Attributes:
        corrected: Interval of the mean difference, widened for the number of claims. None with fewer than
            five seeds.
        effect: The same with its own 95 % interval. None when fewer than two seeds have both rows.
        seeds: How many have both rows.
    """

    word: Word
    corrected: Interval | None
    effect: Interval | None
    seeds: int


def judge(claims: Sequence[tuple[Claim, Runs]]) -> list[Verdict]:
    """The verdicts on all claims of one family, corrected for their number (Holm)."""
    measured = [claim.differences(runs) for claim, runs in claims]
    enough = {
        place: (differences, claims[place][0].margin)
        for place, differences in enumerate(measured)
        if len(differences) >= LEAST_SEEDS
    }
    corrected = holm(enough)
    verdicts = []
    for place, differences in enumerate(measured):
        effect, word = None, cast("Word", "not measured")
        if len(differences) > 1:
            effect, word = t_interval(differences), "undecided"
        if place in corrected:
            word = _word(corrected[place], enough[place][1])
        verdicts.append(Verdict(word, corrected.get(place), effect, len(differences)))
    return verdicts


def _word(interval: Interval, margin: float) -> Word:
    if interval.low > margin:
        return "holds"
    return "does not hold" if interval.high < margin else "undecided"
