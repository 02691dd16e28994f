"""The first section of a report: how well each class is recognised, for whom, and how far to trust it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perennial.server.charts.curves import Curve, Curves, HeatMap
from perennial.server.charts.frame import Axis, format_whole_percent
from perennial.server.measures.calibration import compute_least_samples
from perennial.server.measures.record import (
    Calibration,
    ClassMeasures,
    Measures,
    OperatingPoint,
    PartMeasures,
    PredictionSets,
    compute_wilson_interval,
)
from perennial.server.measures.record import Figure as Measure
from perennial.server.report.markup import (
    MISSING,
    Markup,
    Picture,
    Section,
    build_bar,
    build_element,
    build_numbers_table,
    build_panel,
    build_table,
    escape,
    fold_content,
    format_count,
    format_decimal,
    format_percent,
    join,
)
from perennial.server.run_record import Run

LARGEST_MATRIX = 30
"""Classes up to which the confusion matrix is drawn; above it the most frequent mistakes are listed."""
MOST_ROWS = 30
"""Sites or mistakes that a table shows."""
SELDOM = 0.5
SET_COLUMNS = ("class", "in the set from probability", "calibration samples", "set holds the class")

SOURCES = {
    "server": "on the server's test samples, which no site trained on",
    "sites": "on the samples that sites held out from training, added up over the sites that told them",
    "external": "on labelled data from outside the federation",
}
WORDS = {
    "Sensitivity": "Of the samples that are of this class, the share that the model called so. Also: recall.",
    "Specificity": "Of the samples of all other classes, the share that the model did not call this class.",
    "Positive predictive value": "Of the samples that the model called this class, the share that are. It "
    "depends on how frequent the class is among these samples, and is lower where the class is rarer. Also: "
    "precision.",
    "Negative predictive value": "Of the samples that the model did not call this class, the share that are "
    "of another. It depends on how frequent the class is, too.",
    "AUROC": "The chance that a sample of the class gets a higher probability of it than a sample of another "
    "class: 1 is perfect, 0.5 is guessing. It does not depend on how frequent the class is.",
    "AUPRC": "The precision at each threshold, averaged over the sensitivities that thresholds reach. "
    "Guessing gives the share of the class among the samples, so it is the stricter figure for a rare class.",
    "Balanced accuracy": "The mean sensitivity of the classes: each counts alike, however frequent it is.",
    "Calibration error": "How far stated probabilities are from the share of right answers among answers "
    "stated so, on average.",
    "95 % interval": "Where a figure is expected to lie if as many other samples of the same kind were "
    "judged. Few samples make it wide. It says nothing of patients of another kind.",
}


def report_recognition(run: Run) -> Section | None:
    """The section on how well classes are recognised; None if nothing but right answers was counted."""
    measures = run.measures
    if measures is None:
        return None
    return build_recognition_section(measures, build_recognition_parts(measures))


def build_recognition_section(measures: Measures, parts: Sequence[Picture | Markup]) -> Section:
    """The section on recognition, made of these parts."""
    return Section("What it recognises", parts, _lead(measures))


def build_recognition_parts(measures: Measures) -> list[Picture | Markup]:
    """The section's tables and charts, for the report of a run and that of an external validation."""
    parts: list[Picture | Markup] = [_build_class_table(measures)]
    if 1 < len(measures.classes) <= LARGEST_MATRIX:
        parts.append(_draw_confusion(measures))
    elif mistakes := _build_mistakes_table(measures):
        parts.append(mistakes)
    if measures.calibration.groups:
        parts.append(_draw_calibration(measures.calibration))
    if measures.prediction_sets is not None:
        parts.append(_build_sets_table(measures.prediction_sets))
    if measures.operating_points:
        parts.append(_build_points_table(measures.operating_points))
    if measures.sites:
        parts.append(build_parts_table("By site", "site", measures.sites))
    if measures.subgroups:
        column = measures.subgroup_column or "subgroup"
        parts.append(build_parts_table(f"By {column}", column, measures.subgroups))
    if measures.notes:
        parts.append(
            build_panel(
                "Notes", build_element("ul", join([build_element("li", note) for note in measures.notes]))
            )
        )
    return parts


def _lead(measures: Measures) -> str:
    return (
        f"Measured on {format_count(measures.samples, 'sample')}, {SOURCES[measures.source]}. "
        f"{explain_brackets(measures)} The class with the lowest sensitivity comes first."
    )


def explain_brackets(measures: Measures) -> str:
    """In words, what the intervals of a report and a card take as independent."""
    alike = {
        "samples": "samples are independent",
        "patients": "patients are drawn, with all their samples; those of sites, subgroups, prediction sets, "
        "operating points and other prevalences take samples as independent",
    }
    return f"Brackets are 95 % intervals, for which {alike[measures.interval]}."


def _build_class_table(measures: Measures) -> Markup:
    rows = [_build_class_row(each) for each in sorted(measures.classes, key=_rank_worst_first)]
    whole = [
        "mean of the classes",
        f"{measures.samples:,}",
        _format_figure(measures.balanced_accuracy),
        *[MISSING] * 3,
        _format_figure(measures.macro_auroc, share=False),
        _format_figure(measures.macro_auprc, share=False),
    ]
    columns = [
        *("class", "samples", "sensitivity", "specificity"),
        *("positive predictive value", "negative predictive value", "AUROC", "AUPRC"),
    ]
    body = build_table(columns, [*rows, whole], "lrrrrrrr", "How well each class is recognised")
    words = build_element(
        "dl",
        join([build_element("dt", word) + build_element("dd", text) for word, text in WORDS.items()]),
        "words",
    )
    return build_panel("Each class", body + fold_content("What these words mean", words, 1), long=True)


def _rank_worst_first(measures: ClassMeasures) -> tuple[bool, float]:
    value = measures.sensitivity.value
    return value is None, 0.0 if value is None else value


def _build_class_row(measures: ClassMeasures) -> list[object]:
    sensitivity = measures.sensitivity.value
    name: Markup = escape(measures.name)
    if sensitivity is not None and sensitivity < SELDOM:
        word = "never recognised" if sensitivity == 0 else "seldom recognised"
        name = join([measures.name, build_element("span", word, "flag")], " ")
    return [
        name,
        f"{measures.samples:,}",
        build_bar(_format_figure(measures.sensitivity), sensitivity or 0.0),
        _format_figure(measures.specificity),
        _format_figure(measures.positive_predictive_value),
        _format_figure(measures.negative_predictive_value),
        _format_figure(measures.auroc, share=False),
        _format_figure(measures.auprc, share=False),
    ]


def _format_figure(measure: Measure, *, share: bool = True) -> Markup:
    """A figure with its interval, small, beside it."""
    if measure.value is None:
        return escape(MISSING)
    shown = format_percent(measure.value, 0) if share else f"{measure.value:.2f}"
    interval = measure.interval(100, 0) if share else measure.interval(1, 2)
    return join([shown, build_element("span", interval, "interval")], " ") if interval else escape(shown)


def _draw_confusion(measures: Measures) -> Picture:
    names = [each.name for each in measures.classes]
    totals = [sum(row) for row in measures.confusion]
    shares = [
        [cell / total if total else None for cell in row]
        for row, total in zip(measures.confusion, totals, strict=True)
    ]
    texts = [[f"{cell:,}" if cell else "" for cell in row] for row in measures.confusion]

    def tell(row: int, column: int) -> str:
        cell, share = measures.confusion[row][column], format_percent(shares[row][column], 0)
        return f"{names[row]}, called {names[column]}: {cell:,} ({share} of the class)"

    height = max(280, min(120 + 34 * len(names), 900))
    counts = [[name, *row] for name, row in zip(names, measures.confusion, strict=True)]
    return Picture(
        name="confusion-matrix",
        title="Confusion matrix",
        description="Rows are what samples are, columns what the model called them; the diagonal is right. "
        "Numbers are samples, the shade is the share of the row.",
        chart=HeatMap(names, names, shares, texts, tell, 1.0, height, ("called", "is")),
        wide=True,
        numbers=build_numbers_table(["is / called", *names], counts, "Confusion matrix: samples"),
    )


def _build_mistakes_table(measures: Measures) -> Markup | None:
    names = [each.name for each in measures.classes]
    wrong = [
        (cell, row, column)
        for row, cells in enumerate(measures.confusion)
        for column, cell in enumerate(cells)
        if cell and row != column
    ]
    if not wrong:
        return None
    wrong.sort(key=lambda mistake: (-mistake[0], mistake[1], mistake[2]))
    rows = [
        [names[row], names[column], f"{cell:,}", format_percent(cell / sum(measures.confusion[row]), 0)]
        for cell, row, column in wrong[:MOST_ROWS]
    ]
    columns = ["is", "called", "samples", "share of the class"]
    return build_panel("Most frequent mistakes", build_table(columns, rows, "llrr", "Most frequent mistakes"))


def _draw_calibration(calibration: Calibration) -> Picture:
    scaled = calibration.temperature is not None
    curves = {"as the model states it": calibration.groups}
    if scaled:
        curves["after temperature scaling"] = calibration.scaled_groups
    perfect = Curve("perfect", [(0.0, 0.0), (1.0, 1.0)], dots=False, reference=True)
    drawn = [
        Curve(
            name,
            [(group.stated, group.right) for group in groups],
            [
                f"stated {format_percent(group.stated, 0)}, right {format_percent(group.right, 0)} "
                f"of {group.samples:,} answers"
                for group in groups
            ],
        )
        for name, groups in curves.items()
    ]
    error = f"Calibration error {_format_points(calibration.error)} as the model states probabilities"
    if scaled:
        error += (
            f", {_format_points(calibration.scaled_error)} with temperature "
            f"{format_decimal(calibration.temperature)}, "
            f"which {format_count(calibration.validation_samples, 'validation sample')} chose"
        )
    else:
        error += "; nobody held validation samples to fit a temperature with"
    if calibration.by_chance.value is not None:
        error += (
            f". On as many answers even true probabilities would show {_format_points(calibration.by_chance)}"
        )
    rows = [
        [name, format_percent(group.stated, 0), format_percent(group.right, 0), f"{group.samples:,}"]
        for name, groups in curves.items()
        for group in groups
    ]
    columns = ["probabilities", "stated", "right", "answers"]
    axis = Axis(low=0.0, high=1.02, words=format_whole_percent)
    across, up = "stated probability of the answer", "share of right answers"
    return Picture(
        name="reliability",
        title="Are stated probabilities true?",
        description=f"{error}. A point below the line is too sure of itself.",
        chart=Curves([perfect, *drawn], replace(axis, title=across), replace(axis, title=up), height=420),
        wide=True,
        numbers=build_numbers_table(columns, rows, "Reliability of probabilities"),
    )


def _format_points(measure: Measure) -> str:
    if measure.value is None:
        return MISSING
    return f"{100 * measure.value:.1f} {measure.interval(100, 1)}".rstrip() + " points"


def _build_sets_table(sets: PredictionSets) -> Markup:
    coverage = format_percent(sets.coverage, 0)
    note = (
        "Beside its answer the model gives the set of all classes that it cannot rule out. Of patients like "
        f"those who calibrated it, the set holds the true class in at least {coverage} of each class, on "
        "average over the sites together, not at each one. It cannot hold a class that the model does not "
        "know: an empty set reads “none of the known classes”."
    )
    if sets.void:
        note += f" Here this is not guaranteed: {sets.void}."
    if always := explain_always_in_sets(sets):
        note += f" {always}"
    if sets.mean_size is not None:
        note += f" The sets of the judged samples have {sets.mean_size:.1f} classes on average."
    rows = [
        [
            name,
            format_percent(each.probability, 1) if each.informative else "always in the set",
            MISSING if each.samples is None else f"{each.samples:,}",
            _format_figure(each.covered),
        ]
        for name, each in sets.thresholds.items()
    ]
    body = build_table(SET_COLUMNS, rows, "lrrr", "Thresholds of prediction sets")
    return build_panel(f"Prediction sets, coverage {coverage}", body, note, long=True)


def _build_points_table(points: Sequence[OperatingPoint]) -> Markup:
    rows = [
        [
            each.name,
            f"{each.by} {format_percent(each.asked, 1)}",
            MISSING if each.probability is None else format_percent(each.probability, 1),
            MISSING if each.samples is None else f"{each.samples:,}",
            _format_figure(each.sensitivity),
            _format_figure(each.specificity),
        ]
        for each in points
    ]
    columns = ("class", "asked for", "from probability", "samples to calibrate", "sensitivity", "specificity")
    note = (
        "A class is reported from this probability on, which was chosen on calibration samples: those of the "
        "class keep the sensitivity, those of the others the specificity. Sensitivity and specificity are "
        "those of the judged samples. Without a probability there were too few to choose by."
    )
    return build_panel(
        "Operating points", build_table(columns, rows, "lrrrrr", "Operating points"), note, long=True
    )


def explain_always_in_sets(sets: PredictionSets) -> str:
    """A sentence on why some classes are in every prediction set; '' if none is."""
    always = [name for name, each in sets.thresholds.items() if not each.informative]
    if not always:
        return ""
    verb = "is" if len(always) == 1 else "are"
    return (
        f"{', '.join(always)} {verb} in every set: a threshold for this coverage takes at least "
        f"{compute_least_samples(sets.coverage)} calibration samples of the class."
    )


def build_parts_table(title: str, kind: str, parts: Mapping[str, PartMeasures]) -> Markup:
    """The panel on sites or subgroups, the lowest accuracy first."""
    ranked = sorted(
        parts.items(), key=lambda part: (part[1].accuracy.value is None, part[1].accuracy.value or 0)
    )
    rows = [_build_part_row(name, each) for name, each in ranked[:MOST_ROWS]]
    columns = [kind, "samples", "accuracy", "if as elsewhere", "balanced accuracy", "lowest sensitivity"]
    note = (
        "The lowest first. If as elsewhere: the share that would be right if each class were recognised as "
        "often as in the other rows, so that a row with many samples of a difficult class is not blamed for "
        "them. A mark stands where sensitivities, class by class, are lower than elsewhere by more than "
        "chance explains, with all rows of this table taken together at 95 %."
    )
    if len(ranked) > MOST_ROWS:
        note += f" These are {MOST_ROWS} of {len(ranked):,}; measures.json has all of them."
    return build_panel(title, build_table(columns, rows, "lrrrrl", title), note, long=True)


def _build_part_row(name: str, part: PartMeasures) -> Sequence[object]:
    shown = join([name, build_element("span", "lower", "flag")], " ") if part.lower else escape(name)
    weakest = part.weakest or MISSING
    if (share := part.weakest_sensitivity) is not None:
        weakest += f" ({format_percent(share, 0)})"
        if samples := part.weakest_samples:
            figure = _format_figure(compute_wilson_interval(round(share * samples), samples))
            weakest = join([f"{part.weakest}:", figure, f"of {samples:,}"], " ")
    return [
        shown,
        f"{part.samples:,}",
        build_bar(_format_figure(part.accuracy), part.accuracy.value or 0.0),
        format_percent(part.expected, 0),
        format_percent(part.balanced_accuracy, 0),
        weakest,
    ]
