"""A class at a chosen sensitivity or specificity, and predictive values at a stated prevalence.

The threshold of an operating point comes from calibration samples, which judge nothing.
Predictive values follow from sensitivity and specificity by Bayes's rule. These two are of disjoint samples,
so that the interval between the values of both ends holds the true value with at least 95 %.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from perennial.config.rounds import PointConfig
from perennial.foundation.errors import ConfigError, StateError, nearest
from perennial.learning.evaluation_tables import (
    SCORE_BINS,
    EvaluationTables,
    as_probability,
    least_score_bin,
    score_bin_lower,
)
from perennial.server.measures.figure import Figure, wilson
from perennial.server.measures.record import Measures, OperatingPoint, read_measures

BOTH = 2.2365
"""Standard normal quantile at which two independent intervals both hold with 95 %."""


def operating_points(
    tables: EvaluationTables, names: Sequence[str], points: Mapping[str, PointConfig]
) -> list[OperatingPoint]:
    """Thresholds for the shares asked for, judged on these tables. points: by class."""
    found = []
    for name, point in points.items():
        if name not in names:
            continue  # a class of a later task
        counted = tables.calibration[int(point.by == "specificity"), names.index(name)]
        samples = int(counted.sum())
        # at most so many samples may be on the wrong side; what rounds up to the whole is cautious
        allowed = math.floor(round((1 - point.asked) * samples, 9))
        if point.by == "specificity":
            reach = np.cumsum(counted[::-1])[::-1]
            index = int(np.argmax(reach <= allowed)) if (reach <= allowed).any() else SCORE_BINS
        else:
            below = np.cumsum(counted) - counted
            index = int(np.flatnonzero(below <= allowed)[-1])
        usable = samples >= round(1 / (1 - point.asked), 9) and index < SCORE_BINS
        made = OperatingPoint(
            name=name,
            asked=point.asked,
            by=point.by,
            samples=samples,
            log_odds=score_bin_lower(index, len(names)) if usable else None,
        )
        found.append(judged_point(tables, names, made))
    return found


def judged_point(tables: EvaluationTables, names: Sequence[str], point: OperatingPoint) -> OperatingPoint:
    """The operating point with its sensitivity and specificity on these tables' samples."""
    if point.log_odds is None:
        return point
    label = names.index(point.name)
    first = least_score_bin(point.log_odds, len(names))
    own, others = tables.positive[label], tables.negative[label]
    figures = {
        "probability": as_probability(point.log_odds),
        "sensitivity": wilson(int(own[first:].sum()), int(own.sum())),
        "specificity": wilson(int(others[:first].sum()), int(others.sum())),
    }
    return point.model_copy(update=figures)


def read_shares(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Parse NAME=SHARE texts into class -> share. Raises ConfigError naming what is wrong."""
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if name not in names:
            raise ConfigError(
                f"--prevalence: found {text!r}, allowed NAME=SHARE of a class{nearest(name, names)}"
            )
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not 0 < found[name] < 1:
            raise ConfigError(
                f"--prevalence: found {text!r}, allowed a share between 0 and 1, as in NAME=0.02"
            )
    return found


def at_prevalence(measures: Measures, name: str, share: float) -> tuple[Figure, Figure]:
    """(positive, negative) predictive value of class `name` if it has this share of patients."""
    label = [each.name for each in measures.classes].index(name)
    confusion = np.array(measures.confusion, dtype=np.int64)
    own, called, both = confusion[label].sum(), confusion[:, label].sum(), confusion[label, label]
    others = confusion.sum() - own
    sensitivity = wilson(int(both), int(own), BOTH)
    specificity = wilson(int(others - called + both), int(others), BOTH)
    ends = ("value", "low", "high")
    pairs = [(getattr(sensitivity, end), getattr(specificity, end)) for end in ends]
    if any(value is None for pair in pairs for value in pair):
        return Figure(), Figure()

    def of(hit: float, rejected: float, frequent: float) -> float | None:
        # (true among called, of a condition that is so frequent)
        whole = hit * frequent + (1 - rejected) * (1 - frequent)
        return hit * frequent / whole if whole > 0 else None

    positive = [of(hit, rejected, share) for hit, rejected in pairs]
    negative = [of(rejected, hit, 1 - share) for hit, rejected in pairs]
    return Figure(**dict(zip(ends, positive, strict=True))), Figure(**dict(zip(ends, negative, strict=True)))


def prevalence_in_words(measures: Measures, shares: Mapping[str, float]) -> list[str]:
    """A sentence with the predictive values of each class in `shares`, class -> share of patients."""
    found = []
    for name, share in shares.items():
        positive, negative = at_prevalence(measures, name, share)
        found.append(
            f"Where {100 * share:g} % of patients are {name}: of those called so {_points(positive)} are, "
            f"and of the others {_points(negative)} are not."
        )
    return found


def prevalence_of_run(folder: Path, texts: Sequence[str]) -> list[str]:
    """prevalence_in_words for a run's measures. texts: NAME=SHARE. Raises StateError without measures."""
    if not texts:
        return []
    if (measures := read_measures(folder)) is None:
        raise StateError(f"{folder}: nothing but right answers was counted, from which no value follows")
    return prevalence_in_words(measures, read_shares(texts, [each.name for each in measures.classes]))


def _points(figure: Figure) -> str:
    if figure.value is None:
        return "an unknown share"
    return f"{100 * figure.value:.1f} % {figure.interval(100, 1)}".rstrip()


def worst_parts(measures: Measures) -> str:
    """In words, the site and the subgroup of lowest balanced accuracy; '' if there are not two of either."""
    found = []
    for kind, parts in (("site", measures.sites), (measures.subgroup_column, measures.subgroups)):
        known = {
            name: part.balanced_accuracy for name, part in parts.items() if part.balanced_accuracy is not None
        }
        if len(known) > 1:
            worst = min(known, key=lambda name: known[name])
            found.append(f"{kind} {worst} {100 * known[worst]:.0f} % (of {parts[worst].samples:,})")
    return ", ".join(found)
