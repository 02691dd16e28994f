"""The most important sentences about a model, the worst first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from perennial.config.rounds import PointConfig
from perennial.foundation.errors import ConfigError, StateError, suggest_nearest
from perennial.learning.evaluation_tables import (
    SCORE_BINS,
    EvaluationTables,
    as_probability,
    find_least_score_bin,
    score_bin_lower,
)
from perennial.server.measures.record import (
    FEW,
    ClassMeasures,
    Figure,
    Measures,
    OperatingPoint,
    PartMeasures,
    compute_wilson_interval,
    read_measures,
)

# The threshold of an operating point comes from calibration samples, which judge nothing. Predictive values
# follow from sensitivity and specificity by Bayes's rule. These two are of disjoint samples, so that the
# interval between the values of both ends holds the true value with at least 95 %.


BOTH = 2.2365
"""Standard normal quantile at which two independent intervals both hold with 95 %."""


def choose_operating_points(
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
        found.append(judge_point(tables, names, made))
    return found


def judge_point(tables: EvaluationTables, names: Sequence[str], point: OperatingPoint) -> OperatingPoint:
    """The operating point with its sensitivity and specificity on these tables' samples."""
    if point.log_odds is None:
        return point
    label = names.index(point.name)
    first = find_least_score_bin(point.log_odds, len(names))
    own, others = tables.positive[label], tables.negative[label]
    figures = {
        "probability": as_probability(point.log_odds),
        "sensitivity": compute_wilson_interval(int(own[first:].sum()), int(own.sum())),
        "specificity": compute_wilson_interval(int(others[:first].sum()), int(others.sum())),
    }
    return point.model_copy(update=figures)


def read_shares(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Parse NAME=SHARE texts into class -> share. Raises ConfigError naming what is wrong."""
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if name not in names:
            raise ConfigError(
                f"--prevalence: found {text!r}, allowed NAME=SHARE of a class{suggest_nearest(name, names)}"
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


def compute_predictive_values(measures: Measures, name: str, share: float) -> tuple[Figure, Figure]:
    """(positive, negative) predictive value of class `name` if it has this share of patients."""
    label = [each.name for each in measures.classes].index(name)
    confusion = np.array(measures.confusion, dtype=np.int64)
    own, called, both = confusion[label].sum(), confusion[:, label].sum(), confusion[label, label]
    others = confusion.sum() - own
    sensitivity = compute_wilson_interval(int(both), int(own), BOTH)
    specificity = compute_wilson_interval(int(others - called + both), int(others), BOTH)
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


def describe_prevalence(measures: Measures, shares: Mapping[str, float]) -> list[str]:
    """A sentence with the predictive values of each class in `shares`, class -> share of patients."""
    found = []
    for name, share in shares.items():
        positive, negative = compute_predictive_values(measures, name, share)
        found.append(
            f"Where {100 * share:g} % of patients are {name}: of those called so "
            f"{_format_points(positive)} are, and of the others {_format_points(negative)} are not."
        )
    return found


def describe_run_prevalence(folder: Path, texts: Sequence[str]) -> list[str]:
    """prevalence_in_words for a run's measures. texts: NAME=SHARE. Raises StateError without measures."""
    if not texts:
        return []
    if (measures := read_measures(folder)) is None:
        raise StateError(f"{folder}: nothing but right answers was counted, from which no value follows")
    return describe_prevalence(measures, read_shares(texts, [each.name for each in measures.classes]))


def _format_points(figure: Figure) -> str:
    if figure.value is None:
        return "an unknown share"
    return f"{100 * figure.value:.1f} % {figure.interval(100, 1)}".rstrip()


def describe_worst_parts(measures: Measures) -> str:
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


SELDOM = 0.5
"""A class that is recognised in fewer cases than this is named."""
MISSTATED = 0.1
"""Mean error of stated probabilities from which on it is named, where chance does not explain it."""
MOST_NAMES = 5
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def describe_measures(measures: Measures) -> list[str]:
    """Sentences about what is wrong with a model, worst first, and then how good it is."""
    judged = [each for each in measures.classes if each.samples]
    if not judged:
        return ["Nobody measured how well the model recognises the classes."]
    return [
        sentence
        for part in (
            _describe_collapse,
            _describe_unrecognised,
            _describe_guessing,
            _describe_weak_classes,
            _describe_weak_parts,
            _describe_misstatement,
            _describe_thin_classes,
            _summarise,
        )
        for sentence in part(measures, judged)
    ]


def _describe_collapse(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    called = [each for each in measures.classes if each.called]
    if len(called) == 1 and len(judged) > 1:
        return [f"The model calls every sample {called[0].name}: it has not learnt to tell classes apart."]
    return []


def _describe_unrecognised(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    never = [each for each in judged if each.sensitivity.value == 0]
    if not never:
        return []
    few = sum(each.samples < FEW for each in never)
    note = f" ({_number(few)} of them judged on fewer than {FEW} samples)" if few and len(never) > 1 else ""
    verb = "is" if len(never) == 1 else "are"
    start = f"{_number(len(never))} of {_number(len(judged))} classes {verb} never recognised"
    return [f"{start.capitalize()}: {_join_names(never)}{note}."]


def _describe_guessing(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    balanced, guess = measures.balanced_accuracy, 1 / len(measures.classes)
    if len(measures.classes) > 1 and balanced.low is not None and balanced.low <= guess:
        return [
            f"Over all classes alike the model is right in {_format_percent(balanced.value)}, which "
            f"these samples cannot tell from guessing ({_format_percent(guess)})."
        ]
    return []


def _describe_weak_classes(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    weak = [each for each in judged if 0 < (each.sensitivity.value or 0) < SELDOM]
    if not weak:
        return []
    weak.sort(key=lambda each: each.sensitivity.value or 0)
    shown = ", ".join(
        f"{each.name} ({_format_percent(each.sensitivity.value)})" for each in weak[:MOST_NAMES]
    )
    more = f" and {len(weak) - MOST_NAMES} more" if len(weak) > MOST_NAMES else ""
    return [f"Recognised in less than half of their cases: {shown}{more}."]


def _describe_weak_parts(measures: Measures, judged: Sequence[ClassMeasures]) -> Iterator[str]:
    subgroup = measures.subgroup_column or "subgroup"
    for kind, parts in (("site", measures.sites), (subgroup, measures.subgroups)):
        lower = {name: part for name, part in parts.items() if part.lower}
        names = sorted(lower, key=lambda name, lower=lower: lower[name].accuracy.value or 0)
        shown = ", ".join(f"{name} ({_of_expected(lower[name])})" for name in names[:MOST_NAMES])
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        if names:
            start = "Served worse than the others, class for class and beyond chance, by"
            yield f"{start} {kind}: {shown}{more}."


def _of_expected(part: PartMeasures) -> str:
    said = _format_percent(part.accuracy.value)
    return (
        said
        if part.expected is None
        else f"{said}; as well as elsewhere would be {_format_percent(part.expected)}"
    )


def _describe_misstatement(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    error, scaled = measures.calibration.error, measures.calibration.scaled_error
    shown = scaled if scaled.value is not None else error
    chance = measures.calibration.by_chance.high or 0.0
    if shown.value is None or shown.value <= max(MISSTATED, chance):
        return []
    when = ", after temperature scaling," if scaled.value is not None else ""
    return [f"Stated probabilities are{when} wrong by {100 * shown.value:.0f} points on average."]


def _describe_thin_classes(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    sentences = []
    absent = [each for each in measures.classes if not each.samples]
    if absent:
        verb = "was" if len(absent) == 1 else "were"
        sentences.append(f"{_join_names(absent)} {verb} not judged: no sample was counted.")
    few = [each for each in judged if each.samples < FEW]
    if few:
        sentences.append(f"Judged on fewer than {FEW} samples: {_join_names(few)}.")
    return sentences


def _summarise(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    accuracy, weakest = measures.accuracy, min(judged, key=lambda each: each.sensitivity.value or 0)
    sentence = f"Of {measures.samples:,} samples {_format_percent(accuracy.value)} are classified correctly"
    if accuracy.low is not None and accuracy.high is not None:
        sentence += f" (95 % interval {100 * accuracy.low:.0f} to {100 * accuracy.high:.0f})"
    if len(judged) > 1:
        sentence += (
            f"; class {weakest.name} has the lowest sensitivity, {_format_percent(weakest.sensitivity.value)}"
        )
    sentence += "."
    if (worst := describe_worst_parts(measures)) and measures.balanced_accuracy.value is not None:
        sentence += (
            f" Balanced accuracy {_format_percent(measures.balanced_accuracy.value)}; lowest: {worst}."
        )
    for point in measures.operating_points:
        if point.sensitivity.value is not None:
            sentence += (
                f" {point.name} at its operating point: sensitivity "
                f"{_format_percent(point.sensitivity.value)}, "
                f"specificity {_format_percent(point.specificity.value)} ({point.by} of "
                f"{_format_percent(point.asked)} asked for)."
            )
    return [sentence]


def _join_names(classes: Sequence[ClassMeasures]) -> str:
    more = f" and {len(classes) - MOST_NAMES} more" if len(classes) > MOST_NAMES else ""
    return ", ".join(each.name for each in classes[:MOST_NAMES]) + more


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"


def _format_percent(share: float | None) -> str:
    """A share in whole percent; 'less than 1 %' and 'more than 99 %' where rounding would say none or all."""
    if share is None:
        return "an unknown share"
    if 0 < share < 0.005:
        return "less than 1 %"
    if 0.995 <= share < 1:
        return "more than 99 %"
    return f"{100 * share:.0f} %"
