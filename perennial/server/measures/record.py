"""measures.json: the measures of a run, as it stores them and the report reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file

Z = 1.959963984540054
"""Standard normal quantile of 97.5 %."""
FEW = 10
"""Samples of a class on which no figure says much."""


def _drop_nonfinite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)


Number = Annotated[float | None, AfterValidator(_drop_nonfinite)]


class Figure(BaseModel):
    """value, and the 95 % interval from low to high; all None where nothing was measured."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    value: Number = None
    low: Number = None
    high: Number = None

    def interval(self, factor: float, digits: int) -> str:
        """The interval as '[81, 92]', times factor, with so many digits; '' if there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"[{factor * self.low:.{digits}f}, {factor * self.high:.{digits}f}]"


UNMEASURED = Figure()


def compute_wilson_interval(successes: float, trials: int, z: float = Z) -> Figure:
    """A share with its score interval, which holds its level also for few trials and for shares of 0 or 1.

    Wilson 1927 (doi 10.1080/01621459.1927.10502953).
    """
    if trials <= 0:
        return UNMEASURED
    # SciPy has it too, for an import that takes longer than a small run's last task
    share, square = successes / trials, z * z
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * np.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Figure(value=share, low=min(low, share), high=max(high, share))


def compute_logit_interval(value: float, error: float, fallback_trials: int, z: float = Z) -> Figure:
    """A figure between 0 and 1 with an interval that is symmetric in its log odds.

    error: standard error of the value. fallback_trials: where the value is 0 or 1, or error is 0, the
    interval is as wide as Wilson's of so many trials, because one of width 0 would not be honest.
    """
    if not 0 < value < 1 or error <= 0:
        interval = compute_wilson_interval(0, fallback_trials, z)
        if interval.high is None:
            return Figure(value=value)
        width = interval.high
        return Figure(value=value, low=max(0.0, value - width), high=min(1.0, value + width))
    centre, spread = np.log(value / (1 - value)), z * error / (value * (1 - value))
    low, high = 1 / (1 + np.exp(-(centre - spread))), 1 / (1 + np.exp(-(centre + spread)))
    return Figure(value=value, low=float(low), high=float(high))


def mean_of(figures: list[Figure]) -> Figure:
    """The mean of figures of the same samples, with an interval that is not too narrow however they depend.

    The standard deviation of a mean is at most the mean of the standard deviations, so the mean of the lower
    and of the upper ends is used. Unmeasured ones make the mean unmeasured.
    """
    values = [(figure.value, figure.low, figure.high) for figure in figures]
    known = [(value, low, high) for value, low, high in values if None not in (value, low, high)]
    if not known or len(known) < len(figures):
        return UNMEASURED
    value, low, high = np.mean(np.array(known, dtype=np.float64), axis=0)
    return Figure(value=value, low=low, high=high)


MOST_PARTS = 16


def compute_roc_areas(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """(M,) probability that a sample of the class scores higher than one of another; NaN without either.

    positive, negative: (M, S) samples of the class and of the others by score bin, lowest first.
    """
    of_class, others = positive.sum(axis=1), negative.sum(axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((positive * below).sum(axis=1) / (of_class * others), dtype=np.float64)


def compute_pr_areas(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """(M,) average precision: the precision at each sample of the class, highest score first, on average.

    Within a bin the class's samples are spread evenly among the others: counting the whole bin as called
    before the first of them would be too low by several points if samples are few.
    positive, negative: as in roc_areas. NaN without a sample of the class or of another.
    """
    own, rest = positive[:, ::-1].astype(np.float64), negative[:, ::-1].astype(np.float64)
    hits, called = np.cumsum(own, axis=1) - own, np.cumsum(own + rest, axis=1) - own - rest
    # beyond so many samples in a bin they are taken in equal groups
    parts = np.clip(own, 1, MOST_PARTS)
    areas = np.zeros_like(own)
    for part in range(int(parts.max(initial=0))):
        share = (part + 1) / parts
        found = hits + own * share
        wrong = called - hits + rest * (part + 0.5) / parts
        areas += np.where(part < parts, own / parts * found / np.maximum(found + wrong, 1e-9), 0.0)
    of_class, others = positive.sum(axis=1), negative.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, areas.sum(axis=1) / of_class, np.nan)


def estimate_auroc(positive: np.ndarray, negative: np.ndarray) -> Figure:
    """roc_areas of one class, (S,) each, with DeLong's interval in log odds.

    DeLong, DeLong and Clarke-Pearson 1988 (doi 10.2307/2531595).
    """
    of_class, others = int(positive.sum()), int(negative.sum())
    if of_class == 0 or others == 0:
        return UNMEASURED
    area = float(compute_roc_areas(positive[None], negative[None])[0])
    # how much of the other group each sample of a bin beats, or is beaten by
    placed = (np.cumsum(negative) - negative / 2) / others
    beaten = (of_class - np.cumsum(positive) + positive / 2) / of_class
    variance = _compute_variance(placed, positive) / of_class + _compute_variance(beaten, negative) / others
    return compute_logit_interval(area, float(np.sqrt(variance)), min(of_class, others))


def estimate_auprc(positive: np.ndarray, negative: np.ndarray) -> Figure:
    """precision_recall_areas of one class, (S,) each, with a binomial interval in log odds.

    The area is treated as a share of as many trials as the class has samples (Boyd, Eng and Page 2013,
    doi 10.1007/978-3-642-40994-3_29).
    """
    of_class = int(positive.sum())
    if of_class == 0 or int(negative.sum()) == 0:
        return UNMEASURED
    area = float(compute_pr_areas(positive[None], negative[None])[0])
    return compute_logit_interval(area, float(np.sqrt(area * (1 - area) / of_class)), of_class)


def _compute_variance(values: np.ndarray, counts: np.ndarray) -> float:
    """Sample variance of values that occur so often; 0 for a single one."""
    n = counts.sum()
    if n < 2:
        return 0.0
    mean = (values * counts).sum() / n
    return float(((values - mean) ** 2 * counts).sum() / (n - 1))


FILE = "measures.json"
"""In a run's folder."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ClassMeasures(_Part):
    """One class against all others. samples: of the class. called: samples that were predicted as it."""

    name: str
    samples: int
    called: int
    sensitivity: Figure = UNMEASURED
    specificity: Figure = UNMEASURED
    positive_predictive_value: Figure = UNMEASURED
    negative_predictive_value: Figure = UNMEASURED
    auroc: Figure = UNMEASURED
    auprc: Figure = UNMEASURED


class PartMeasures(_Part):
    """One site, or one subgroup of patients.

    expected: the accuracy that it would have if each class were recognised as often as in the other parts.
    lower: whether sensitivities, class by class, are lower than in the others by more than chance, all parts
    of the kind taken together at 95 %. classes: samples, right answers and samples assigned to each class;
    None if there are too many parts to keep them.
    """

    samples: int
    accuracy: Figure = UNMEASURED
    balanced_accuracy: Number = None
    expected: Number = None
    weakest: str = ""
    weakest_sensitivity: Number = None
    weakest_samples: int | None = None
    lower: bool = False
    classes: dict[str, tuple[int, int, int]] | None = None


class ReliabilityGroup(_Part):
    """Answers of similar stated probability: their number, mean probability, share of right ones."""

    samples: int
    stated: float
    right: float


class Calibration(_Part):
    """Calibration before temperature scaling, and after it if validation samples chose a temperature.

    by_chance: the error that true probabilities would show, at the temperature if there is one.
    """

    error: Figure = UNMEASURED
    temperature: float | None = None
    validation_samples: int = 0
    scaled_error: Figure = UNMEASURED
    by_chance: Figure = UNMEASURED
    groups: list[ReliabilityGroup] = []
    scaled_groups: list[ReliabilityGroup] = []


class SetThreshold(_Part):
    """The least probability with which a class is in a set. informative: as in conformal.Threshold.

    log_odds: of that probability; None: the class is always in the set. covered: share of the class's judged
    samples whose set holds it.
    """

    probability: float
    log_odds: Number = None
    samples: int | None = None
    informative: bool
    covered: Figure = UNMEASURED


class PredictionSets(_Part):
    """Sets that hold the true class with a stated probability. void: why that is not guaranteed, or ''.

    mean_size: classes in the sets of the judged samples, on average.
    """

    coverage: float
    mean_size: Number = None
    thresholds: dict[str, SetThreshold] = {}
    void: str = ""


class OperatingPoint(_Part):
    """The least score with which a class is reported.

    asked: the share to be kept; by: of the class's samples that reach it (sensitivity) or of others that do
    not (specificity). samples: calibration samples that it is kept on. log_odds, probability: the threshold;
    None where they were too few. sensitivity, specificity: of the judged samples.
    """

    name: str
    asked: float
    by: Literal["sensitivity", "specificity"] = "specificity"
    samples: int | None = None
    log_odds: Number = None
    probability: Number = None
    sensitivity: Figure = UNMEASURED
    specificity: Figure = UNMEASURED


class Measures(_Part):
    """All measures of a model.

    source: who counted: the server on its test samples, the sites, or somebody outside the federation.
    held_out: samples that were counted as right or wrong; samples: those of them that the tables cover.
    interval: what the intervals take as independent. model_file_sha256: of the model, in an evaluation.
    """

    model_file_sha256: str = ""
    source: Literal["server", "sites", "external"]
    task: int | None = None
    samples: int
    held_out: int
    interval: Literal["samples", "patients"] = "samples"
    headline: list[str] = []
    accuracy: Figure = UNMEASURED
    balanced_accuracy: Figure = UNMEASURED
    macro_auroc: Figure = UNMEASURED
    macro_auprc: Figure = UNMEASURED
    classes: list[ClassMeasures] = []
    confusion: list[list[int]] = []
    calibration: Calibration = Calibration()
    sites: dict[str, PartMeasures] = {}
    subgroup_column: str = ""
    subgroups: dict[str, PartMeasures] = {}
    prediction_sets: PredictionSets | None = None
    operating_points: list[OperatingPoint] = []
    notes: Sequence[str] = Field(default_factory=list)


def write_measures(folder: Path, measures: Measures) -> None:
    """Write measures.json into a run's folder."""
    text = json.dumps(measures.model_dump(mode="json"), separators=(",", ":"))
    replace_file(folder / FILE, text.encode(), mode=0o644)


def read_measures(folder: Path) -> Measures | None:
    """The measures in a run's folder; None without any. Raises StateError when the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return Measures.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StateError(f"{path}: damaged ({str(error)[:200]}); resume the run to write it again") from error


def drop_classes_of_few(
    classes: Mapping[str, float | None], measures: Measures | None
) -> dict[str, float | None]:
    """The accuracies without those of fewer than FEW samples, all of which chance may have missed."""
    few = {each.name for each in measures.classes if each.samples < FEW} if measures is not None else ()
    return {name: share for name, share in classes.items() if name not in few}
