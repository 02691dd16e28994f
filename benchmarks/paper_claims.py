"""What a paper claims of two rows of a table, and whether our figures bear it out."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from typing import Any, Literal

Word = Literal["holds", "does not hold", "undecided", "not measured"]


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


@dataclass(frozen=True)
class Verdict:
    """Whether a paper's claim holds in our figures.

    difference: mean over seeds of better minus worse (worse minus better where lower is better), points.
    error: its standard error over the seeds. The claim holds when the difference is above the margin by more
    than the standard error, does not hold when it is below by more, and is undecided in between.
    """

    word: Word
    difference: float = 0.0
    error: float = 0.0
    seeds: int = 0


def judge(claim: Claim, runs: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict on a claim from a table's runs, seed by seed, which takes out what seeds have in common."""
    better, worse = (
        {run["seed"]: run for run in runs if run["row"] == row} for row in (claim.better, claim.worse)
    )
    sign = -1 if claim.lower else 1
    differences = [
        100 * sign * (better[seed]["measures"][claim.measure] - worse[seed]["measures"][claim.measure])
        for seed in sorted(better.keys() & worse.keys())
    ]
    differences = [difference for difference in differences if not isnan(difference)]
    if len(differences) < 2:
        return Verdict("not measured", seeds=len(differences))
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / sqrt(len(differences))
    word: Word = "undecided"
    if mean - claim.margin > error:
        word = "holds"
    elif claim.margin - mean > error:
        word = "does not hold"
    return Verdict(word, mean, error, len(differences))
