"""Computes all measures, with their intervals, from tables of counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import numpy as np

from perennial.learning.evaluation_tables import EvaluationTables, as_probability, find_least_score_bin
from perennial.learning.scored import Scored
from perennial.server.measures.calibration import (
    compute_ece,
    compute_reliability,
    compute_thresholds,
    estimate_calibration_error,
    estimate_chance_error,
)
from perennial.server.measures.headline import describe_measures
from perennial.server.measures.record import (
    UNMEASURED,
    Calibration,
    ClassMeasures,
    Figure,
    Measures,
    PartMeasures,
    PredictionSets,
    SetThreshold,
    compute_logit_interval,
    compute_pr_areas,
    compute_roc_areas,
    compute_wilson_interval,
    estimate_auprc,
    estimate_auroc,
    mean_of,
)

RESAMPLES = 1000
MOST_WORK = 300_000_000
"""Cells that the bootstrap over patients may count; it draws fewer times for larger data."""
LEAST_RESAMPLES = 200
MOST_CELLS = 5_000
"""Counts by class are kept for each site up to so many of them."""
SHARES = ("sensitivity", "specificity", "positive_predictive_value", "negative_predictive_value")
LEAST_WIDTH = 1e-9
"""Ends of drawn values that are nearer to each other differ by a float's error."""
Intervals = Mapping[str, tuple[float, float]]
"""(low, high) by the name of a figure; figures of one class are called `sensitivity/3`."""


def measure_classes(
    tables: EvaluationTables, names: Sequence[str], intervals: Intervals | None = None
) -> list[ClassMeasures]:
    """Measures of each class. names: by label. intervals: replace those for independent samples."""
    cells = _count_cells(tables)
    found = []
    for label, name in enumerate(names):
        figures = {measure: compute_wilson_interval(*map(int, cells[measure][label])) for measure in SHARES}
        for measure, area in (("auroc", estimate_auroc), ("auprc", estimate_auprc)):
            figures[measure] = area(tables.positive[label], tables.negative[label])
        if intervals is not None:
            figures = {
                measure: _replace_ends(figure, intervals.get(f"{measure}/{label}"))
                for measure, figure in figures.items()
            }
        samples, _, called = map(int, tables.by_class()[label])
        found.append(ClassMeasures(name=name, samples=samples, called=called, **figures))
    return found


def assemble(
    tables: EvaluationTables,
    names: Sequence[str],
    intervals: Intervals | None,
    temperature: float | None,
    by_site: Mapping[str, np.ndarray],
    subgroups: Mapping[str, np.ndarray],
    **more: Any,
) -> Measures:
    """All measures of a model, with its headline.

    names: by label. intervals: over patients; None: samples are independent. by_site, subgroups: as for
    part_measures. more: further fields of Measures.
    """
    classes = measure_classes(tables, names, intervals)
    present = [measures for measures in classes if measures.samples]
    whole = {
        "accuracy": compute_wilson_interval(sum(tables.correct), tables.samples),
        "balanced_accuracy": _average_sensitivity(tables)
        if intervals is None
        else mean_of([each.sensitivity for each in present]),
        "macro_auroc": mean_of([each.auroc for each in present]),
        "macro_auprc": mean_of([each.auprc for each in present]),
    }
    ends = intervals or {}
    found = Measures(
        interval="samples" if intervals is None else "patients",
        samples=tables.samples,
        classes=classes,
        confusion=tables.confusion.tolist(),
        calibration=measure_calibration(tables, intervals, temperature),
        sites=measure_parts(by_site, names),
        subgroups=measure_parts(subgroups, names),
        **{name: _replace_ends(figure, ends.get(name)) for name, figure in whole.items()},
        **more,
    )
    return found.model_copy(update={"headline": describe_measures(found)})


def measure_calibration(
    tables: EvaluationTables, intervals: Intervals | None = None, temperature: float | None = None
) -> Calibration:
    """Calibration before and after scaling. temperature: of the tables' scores; None: nobody fitted one."""
    before, after = tables.confidence[0], None if temperature is None else tables.confidence[1]
    errors = {
        "error": estimate_calibration_error(before),
        "scaled_error": UNMEASURED if after is None else estimate_calibration_error(after),
    }
    if intervals is not None:
        errors = {name: _replace_ends(figure, intervals.get(name)) for name, figure in errors.items()}
    return Calibration(
        **errors,
        temperature=temperature,
        by_chance=estimate_chance_error(before if after is None else after),
        validation_samples=int(tables.validation[0]),
        groups=compute_reliability(before),
        scaled_groups=[] if after is None else compute_reliability(after),
    )


def build_prediction_sets(
    tables: EvaluationTables, names: Sequence[str], coverage: float, void: str = ""
) -> PredictionSets:
    """Prediction sets of a coverage, judged on these tables. void: why it is not guaranteed, or ''."""
    found = compute_thresholds(tables.calibration[0], coverage)
    bounds = {
        name: SetThreshold(probability=as_probability(each.log_odds), **asdict(each))
        for name, each in zip(names, found, strict=True)
    }
    return judge_sets(tables, PredictionSets(coverage=coverage, thresholds=bounds, void=void))


def judge_sets(tables: EvaluationTables, sets: PredictionSets) -> PredictionSets:
    """Prediction sets with the same thresholds, and their coverage and mean size on these tables' samples."""
    judged, included = {}, 0
    for label, (name, bound) in enumerate(sets.thresholds.items()):
        first = 0 if bound.log_odds is None else find_least_score_bin(bound.log_odds, tables.classes)
        own = tables.positive[label]
        covered = compute_wilson_interval(int(own[first:].sum()), int(own.sum()))
        judged[name] = bound.model_copy(update={"covered": covered})
        included += int(own[first:].sum() + tables.negative[label][first:].sum())
    size = included / tables.samples if tables.samples else None
    return sets.model_copy(update={"thresholds": judged, "mean_size": size})


def measure_parts(by_class: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, PartMeasures]:
    """The measures of each site or subgroup. by_class: its (M, 3) samples, right answers, predictions."""
    together = sum(by_class.values(), start=np.zeros((len(names), 3), dtype=np.int64))
    z = NormalDist().inv_cdf(1 - 0.025 / max(1, len(by_class)))
    keep = len(by_class) * len(names) <= MOST_CELLS
    found = {}
    for part, cells in by_class.items():
        samples, right = int(cells[:, 0].sum()), int(cells[:, 1].sum())
        own, others = cells[:, :2], together[:, :2] - cells[:, :2]
        sensitivities = {
            name: int(hits) / int(n) for name, (n, hits, _) in zip(names, cells, strict=True) if n
        }
        weakest = min(sensitivities, key=sensitivities.__getitem__, default="")
        found[part] = PartMeasures(
            samples=samples,
            accuracy=compute_wilson_interval(right, samples),
            balanced_accuracy=sum(sensitivities.values()) / len(sensitivities) if sensitivities else None,
            weakest=weakest,
            weakest_sensitivity=sensitivities.get(weakest),
            weakest_samples=int(cells[names.index(weakest), 0]) if weakest else None,
            expected=_compute_expected(own, others),
            lower=_lower(own, others, z),
            classes={
                name: (int(n), int(hits), int(called))
                for name, (n, hits, called) in zip(names, cells, strict=True)
            }
            if keep
            else None,
        )
    return found


def estimate_patient_intervals(scored: Scored, patients: np.ndarray, temperature: float | None) -> Intervals:
    """95 % intervals by drawing patients with replacement; all samples of a patient come and go together.

    Where every draw gives the same value, a figure rests on as many trials as patients, and the ends of a
    mean of classes are left out: they follow from those of the classes.
    patients: (n,) each sample's patient, from 0. temperature: None if none was chosen.
    """
    classes = scored.score.shape[1]
    work = max(1, len(scored) * (classes + 45))
    draws = int(min(RESAMPLES, max(LEAST_RESAMPLES, MOST_WORK // work)))
    count = int(patients.max()) + 1
    generator = np.random.default_rng(0)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        weights = generator.multinomial(count, np.full(count, 1 / count))[patients]
        for name, value in point_values(scored.build_tables(weights), temperature).items():
            found.setdefault(name, []).append(value)
    known = {name: [each for each in values if not math.isnan(each)] for name, values in found.items()}
    drawn = {name: np.quantile(values, [0.025, 0.975]) for name, values in known.items() if values}
    ends = {
        name: (float(low), float(high)) for name, (low, high) in drawn.items() if high - low > LEAST_WIDTH
    }
    alike = drawn.keys() - ends.keys()
    return ends | _estimate_without_spread(scored, patients, {name: known[name][0] for name in alike})


def _estimate_without_spread(
    scored: Scored, patients: np.ndarray, values: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """The ends of values that rest on as many trials as patients; those of means of classes are left out."""
    everyone = len(np.unique(patients))
    trials: dict[str, int] = {name: everyone for name in ("accuracy", "error", "scaled_error")}
    for label in range(scored.score.shape[1]):
        own, called = scored.label == label, scored.predicted == label
        counts = [len(np.unique(patients[rows])) for rows in (own, ~own, called, ~called)]
        by_measure = zip((*SHARES, "auroc", "auprc"), [*counts, min(counts[:2]), counts[0]], strict=True)
        trials |= {f"{measure}/{label}": count for measure, count in by_measure}
    found = {}
    for name in values.keys() & trials.keys():
        value, count = values[name], trials[name]
        if name.startswith(("accuracy", *SHARES)):
            figure = compute_wilson_interval(value * count, count)
        else:
            figure = compute_logit_interval(value, 0.0, count)
        if figure.low is not None and figure.high is not None:
            found[name] = (figure.low, figure.high)
    return found


def point_values(tables: EvaluationTables, temperature: float | None) -> dict[str, float]:
    """The value of each measure, by the names of Intervals, without intervals; NaN if not measured.

    temperature: None if none was chosen; then there is no scaled_error.
    """
    cells = _count_cells(tables)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = {name: counts[:, 0] / counts[:, 1] for name, counts in cells.items()}
    areas = {
        "auroc": compute_roc_areas(tables.positive, tables.negative),
        "auprc": compute_pr_areas(tables.positive, tables.negative),
    }
    found = {
        f"{name}/{label}": float(value)
        for name, values in (shares | areas).items()
        for label, value in enumerate(values)
    }
    present = tables.confusion.sum(axis=1) > 0
    found["accuracy"] = sum(tables.correct) / tables.samples if tables.samples else math.nan
    for name, values in (
        ("balanced_accuracy", shares["sensitivity"]),
        ("macro_auroc", areas["auroc"]),
        ("macro_auprc", areas["auprc"]),
    ):
        found[name] = float(values[present].mean()) if present.any() else math.nan
    for place, name in enumerate(("error", "scaled_error")):
        scaled = temperature is not None or not place
        value = compute_ece(tables.confidence[place]) if scaled else None
        found[name] = math.nan if value is None else value
    return found


def _count_cells(tables: EvaluationTables) -> dict[str, np.ndarray]:
    """(M, 2) of each of SHARES: the part, and the whole that it is a share of."""
    samples, right, called = tables.by_class().T
    everyone = tables.samples
    others, not_called = everyone - samples, everyone - called
    rejected = everyone - samples - called + right
    pairs = ((right, samples), (rejected, others), (right, called), (rejected, not_called))
    return {name: np.stack(pair, axis=1) for name, pair in zip(SHARES, pairs, strict=True)}


def _average_sensitivity(tables: EvaluationTables) -> Figure:
    """The mean sensitivity of the classes with samples; samples of different classes are independent."""
    figures = [
        compute_wilson_interval(right, total)
        for right, total in zip(tables.correct, tables.total, strict=True)
        if total
    ]
    if not figures:
        return UNMEASURED
    parts = np.array([(figure.value, figure.low, figure.high) for figure in figures], dtype=np.float64)
    value = parts[:, 0].mean()
    # MOVER: the ends of a sum of independent estimates, from the ends of each (Zou and Donner 2008)
    below = np.sqrt(((parts[:, 0] - parts[:, 1]) ** 2).sum()) / len(parts)
    above = np.sqrt(((parts[:, 2] - parts[:, 0]) ** 2).sum()) / len(parts)
    return Figure(value=value, low=max(0.0, value - below), high=min(1.0, value + above))


def _compute_expected(own: np.ndarray, others: np.ndarray) -> float | None:
    """The share of right answers if each class were recognised as often as elsewhere; own, others: (M, 2).

    None where no class is held by both.
    """
    both = (own[:, 0] > 0) & (others[:, 0] > 0)
    if not both.any():
        return None
    elsewhere = others[both, 1] / others[both, 0]
    # a class that nobody else holds is taken as it is
    right = own[both, 0] @ elsewhere + own[~both, 1].sum()
    return float(right / own[:, 0].sum())


def _lower(own: np.ndarray, others: np.ndarray, z: float) -> bool:
    """Whether the model has a lower sensitivity here than elsewhere, class by class, beyond chance.

    own, others: (M, 2) samples and right answers by class. A part with many samples of a difficult class is
    not served worse for that: the strata are the classes (Mantel and Haenszel 1959, with their correction of
    one half), at the two-sided level of z.
    """
    both = (own[:, 0] > 0) & (others[:, 0] > 0)
    here, all_ = own[both].astype(np.float64), (own + others)[both].astype(np.float64)
    count, right = all_.T
    excess = (here[:, 1] - here[:, 0] * right / count).sum()
    variance = (here[:, 0] * (count - here[:, 0]) * right * (count - right) / (count**2 * (count - 1))).sum()
    return bool(variance > 0 and -excess - 0.5 > z * math.sqrt(variance))


def _replace_ends(figure: Figure, ends: tuple[float, float] | None) -> Figure:
    """The figure between other ends, which always enclose it."""
    if ends is None or figure.value is None:
        return figure
    return Figure(value=figure.value, low=min(ends[0], figure.value), high=max(ends[1], figure.value))
