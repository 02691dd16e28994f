"""What a paper claims of two rows of a table, and whether our figures bear it out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal

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

    difference: None when fewer than two seeds have both rows. The claim holds when the whole interval is
    above its margin and does not hold when the whole interval is below; else, and with fewer than five seeds,
    it is undecided.
    """

    word: Word
    difference: Interval | None
    seeds: int


def judge(claims: Sequence[tuple[Claim, Runs]], tested: int | None = None) -> list[Verdict]:
    """The verdicts on all claims of a page, with intervals that are corrected for their number (Holm).

    tested: how many were ever tested, with those that are on the page no more; None: these.
    """
    measured = [(claim.differences(runs), claim.margin) for claim, runs in claims]
    enough = {place: test for place, test in enumerate(measured) if len(test[0]) >= LEAST_SEEDS}
    corrected = holm(enough, None if tested is None else tested - len(measured) + len(enough))
    verdicts = []
    for place, (differences, margin) in enumerate(measured):
        if len(differences) < 2:
            verdicts.append(Verdict("not measured", None, len(differences)))
        elif place not in corrected:
            verdicts.append(Verdict("undecided", t_interval(differences), len(differences)))
        else:
            interval = corrected[place]
            verdicts.append(Verdict(_word(interval, margin), interval, len(differences)))
    return verdicts


def _word(interval: Interval, margin: float) -> Word:
    if interval.low > margin:
        return "holds"
    return "does not hold" if interval.high < margin else "undecided"
