"""How far one record may move what a charge covers, when both copies draw the same noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict

from perennial.config.experiment import Experiment
from perennial.privacy.entries import Entry

ROUNDING = 1e-4
"""Share by which arithmetic in 32 bits may add to a difference of two updates."""


@dataclass(frozen=True)
class Bound:
    """moved: how far the copies lie apart, in the norm and units of bound."""

    field: str
    moved: float
    bound: float


def bound_of(
    entry: Entry,
    request: RecordDict,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    experiment: Experiment,
    *,
    replaced: bool,
) -> Bound | None:
    """The bound of what a charge covers in two replies; None where none is known."""
    if entry.kind == "update":
        return _of_update(request, first, second, experiment, replaced=replaced)
    return _of_counts(first, second, experiment, replaced=replaced) if entry.kind == "evaluation" else None


def _of_update(
    request: RecordDict,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    experiment: Experiment,
    *,
    replaced: bool,
) -> Bound | None:
    privacy = experiment.privacy
    names = [name for name in first if name.startswith("TrainReply.update/")]
    moved = math.hypot(*(_apart(first, second, name) for name in names))
    length = math.hypot(*(float(np.linalg.norm(first[name].astype(np.float64))) for name in names))
    slack = ROUNDING * (1 + length)
    if privacy.mode != "sample":
        fields: Any = request["fields"]
        norm: Any = fields.get("clip_norm") or privacy.clip_norm
        return Bound("TrainReply.update", moved, 2 * float(norm) + slack)
    optimizer = experiment.learner.optimizer
    if optimizer.name != "sgd" or optimizer.schedule != "constant":
        return None
    assert privacy.clip_norm is not None
    one = optimizer.lr * privacy.clip_norm / experiment.learner.batch_size
    return Bound("TrainReply.update", moved, one * (2 if replaced else 1) + slack)


def _of_counts(
    first: Mapping[str, Any], second: Mapping[str, Any], experiment: Experiment, *, replaced: bool
) -> Bound | None:
    if "EvaluateReply.correct" not in first or first.get("EvaluateReply.withheld") != second.get(
        "EvaluateReply.withheld"
    ):
        return None
    right = np.subtract(first["EvaluateReply.correct"], second["EvaluateReply.correct"])
    wrong = np.subtract(first["EvaluateReply.total"], second["EvaluateReply.total"]) - right
    moved = float(np.linalg.norm(np.concatenate([right, wrong])))
    if experiment.privacy.mode == "sample":
        return Bound("EvaluateReply", moved, math.sqrt(2) if replaced else 1.0)
    # each cell is rounded to a whole sample
    norm = experiment.evaluation.clip_counts or 1.0
    return Bound("EvaluateReply", moved, 2 * norm + math.sqrt(2 * len(right)))


def _apart(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> float:
    return float(np.linalg.norm(first[name].astype(np.float64) - second[name]))
