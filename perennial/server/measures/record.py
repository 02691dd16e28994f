"""measures.json: the measures of a run, as it stores them and the report reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file
from perennial.server.measures.figure import UNMEASURED, Figure, Number

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
    interval: what the intervals take as independent.
    """

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
