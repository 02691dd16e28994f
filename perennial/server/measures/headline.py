"""The most important sentences about a model, the worst first."""

from collections.abc import Iterator, Sequence

from perennial.server.measures.operating import worst_parts
from perennial.server.measures.record import ClassMeasures, Measures, PartMeasures

SELDOM = 0.5
"""A class that is recognised in fewer cases than this is named."""
FEW = 10
"""Samples of a class on which no figure says much."""
MISSTATED = 0.1
"""Mean error of stated probabilities from which on it is named, where chance does not explain it."""
MOST_NAMES = 5
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def headline(measures: Measures) -> list[str]:
    """Sentences about what is wrong with a model, worst first, and then how good it is."""
    judged = [each for each in measures.classes if each.samples]
    if not judged:
        return ["Nobody measured how well the model recognises the classes."]
    return [
        sentence
        for part in (_collapse, _never, _chance, _seldom, _served_worse, _misstated, _thin, _summary)
        for sentence in part(measures, judged)
    ]


def _collapse(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    called = [each for each in measures.classes if each.called]
    if len(called) == 1 and len(judged) > 1:
        return [f"The model calls every sample {called[0].name}: it has not learnt to tell classes apart."]
    return []


def _never(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    never = [each for each in judged if each.sensitivity.value == 0]
    if not never:
        return []
    few = sum(each.samples < FEW for each in never)
    note = f" ({_number(few)} of them judged on fewer than {FEW} samples)" if few and len(never) > 1 else ""
    verb = "is" if len(never) == 1 else "are"
    start = f"{_number(len(never))} of {_number(len(judged))} classes {verb} never recognised"
    return [f"{start.capitalize()}: {_names(never)}{note}."]


def _chance(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    balanced, guess = measures.balanced_accuracy, 1 / len(measures.classes)
    if len(measures.classes) > 1 and balanced.low is not None and balanced.low <= guess:
        return [
            f"Over all classes alike the model is right in {_percent(balanced.value)}, which these samples "
            f"cannot tell from guessing ({_percent(guess)})."
        ]
    return []


def _seldom(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    weak = [each for each in judged if 0 < (each.sensitivity.value or 0) < SELDOM]
    if not weak:
        return []
    weak.sort(key=lambda each: each.sensitivity.value or 0)
    shown = ", ".join(f"{each.name} ({_percent(each.sensitivity.value)})" for each in weak[:MOST_NAMES])
    more = f" and {len(weak) - MOST_NAMES} more" if len(weak) > MOST_NAMES else ""
    return [f"Recognised in less than half of their cases: {shown}{more}."]


def _served_worse(measures: Measures, judged: Sequence[ClassMeasures]) -> Iterator[str]:
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
    said = _percent(part.accuracy.value)
    return (
        said if part.expected is None else f"{said}; as well as elsewhere would be {_percent(part.expected)}"
    )


def _misstated(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    error, scaled = measures.calibration.error, measures.calibration.scaled_error
    shown = scaled if scaled.value is not None else error
    chance = measures.calibration.by_chance.high or 0.0
    if shown.value is None or shown.value <= max(MISSTATED, chance):
        return []
    when = ", after temperature scaling," if scaled.value is not None else ""
    return [f"Stated probabilities are{when} wrong by {100 * shown.value:.0f} points on average."]


def _thin(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    sentences = []
    absent = [each for each in measures.classes if not each.samples]
    if absent:
        verb = "was" if len(absent) == 1 else "were"
        sentences.append(f"{_names(absent)} {verb} not judged: no sample was counted.")
    few = [each for each in judged if each.samples < FEW]
    if few:
        sentences.append(f"Judged on fewer than {FEW} samples: {_names(few)}.")
    return sentences


def _summary(measures: Measures, judged: Sequence[ClassMeasures]) -> list[str]:
    accuracy, weakest = measures.accuracy, min(judged, key=lambda each: each.sensitivity.value or 0)
    sentence = f"Of {measures.samples:,} samples {_percent(accuracy.value)} are classified correctly"
    if accuracy.low is not None and accuracy.high is not None:
        sentence += f" (95 % interval {100 * accuracy.low:.0f} to {100 * accuracy.high:.0f})"
    if len(judged) > 1:
        sentence += (
            f"; class {weakest.name} has the lowest sensitivity, {_percent(weakest.sensitivity.value)}"
        )
    sentence += "."
    if (worst := worst_parts(measures)) and measures.balanced_accuracy.value is not None:
        sentence += f" Balanced accuracy {_percent(measures.balanced_accuracy.value)}; lowest: {worst}."
    for point in measures.operating_points:
        if point.sensitivity.value is not None:
            sentence += (
                f" {point.name} at its operating point: sensitivity {_percent(point.sensitivity.value)}, "
                f"specificity {_percent(point.specificity.value)} ({point.by} of {_percent(point.asked)} "
                "asked for)."
            )
    return [sentence]


def _names(classes: Sequence[ClassMeasures]) -> str:
    more = f" and {len(classes) - MOST_NAMES} more" if len(classes) > MOST_NAMES else ""
    return ", ".join(each.name for each in classes[:MOST_NAMES]) + more


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"


def _percent(share: float | None) -> str:
    """A share in whole percent; 'less than 1 %' and 'more than 99 %' where rounding would say none or all."""
    if share is None:
        return "an unknown share"
    if 0 < share < 0.005:
        return "less than 1 %"
    if 0.995 <= share < 1:
        return "more than 99 %"
    return f"{100 * share:.0f} %"
