"""How far one record may move what a charge covers, when both copies draw the same noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict

from perennial.config.experiment import Experiment
from perennial.config.secure_words import UpdateWords
from perennial.models.feature_maps.projection import RADIUS_SQUARED
from perennial.privacy.accountants import (
    compute_digest_l1_sensitivity,
    compute_digest_l2_sensitivity,
)
from perennial.privacy.entries import Entry
from perennial.privacy.noised_sums import STEPS, compute_replacement, compute_sensitivity

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
    if "MaskedReply.words/words" in first:
        return _of_words(entry, request, first, second, experiment, replaced=replaced)
    if entry.kind == "update":
        return _of_update(request, first, second, experiment, replaced=replaced)
    if entry.kind == "statistics":
        names = ("gram", "sums", "counts")
        parts = [_signed(first, second, f"StatisticsReply.statistics/{name}") for name in names]
        return _of_sums("StatisticsReply.statistics", parts, experiment, replaced=replaced)
    if entry.kind == "evaluation":
        return _of_counts(first, second, experiment, replaced=replaced)
    return _of_digests(first, second, experiment) if entry.kind == "digest" else None


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


def _of_words(
    entry: Entry,
    request: RecordDict,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    experiment: Experiment,
    *,
    replaced: bool,
) -> Bound | None:
    """Masks and noise are the same in both copies, so that the difference of words is that of values."""
    field = "MaskedReply.words"
    moved = first[f"{field}/words"] - second[f"{field}/words"]  # wraps round as the words do
    if entry.kind == "update":
        updates = len(request["fields"]["roster"])  # pyright: ignore[reportIndexIssue, reportArgumentType]
        layout = UpdateWords(experiment, updates)
        if layout.noise is None or experiment.privacy.clip_norm is None:
            return None
        values = moved[: len(moved) - 1].astype(np.float64) * layout.noise.step
        return Bound(field, float(np.linalg.norm(values)), 2 * experiment.privacy.clip_norm * (1 + ROUNDING))
    if entry.kind != "statistics":
        return None
    tasks = experiment.tasks.count or 1
    classes = len(experiment.data.classes or ()) // tasks
    # D (D + 1) / 2 products, C D sums, C counts
    width = next(
        width
        for width in range(1, len(moved))
        if width * (width + 1) // 2 + classes * (width + 1) == len(moved)
    )
    products = width * (width + 1) // 2
    parts = np.split(moved, [products, products + classes * width])
    return _of_sums(
        field,
        [part.reshape(classes, -1) if i == 1 else part for i, part in enumerate(parts)],
        experiment,
        replaced=replaced,
    )


def _of_sums(field: str, parts: list[Any], experiment: Experiment, *, replaced: bool) -> Bound:
    """In units of a sample's greatest length; products above the diagonal stand for two."""
    gram, sums, counts = parts
    blocks = experiment.privacy.blocks
    width = sums.shape[1]
    rows = np.arange(width)
    twice = np.full(len(gram), math.sqrt(2))
    if len(gram):
        twice[rows * width - rows * (rows - 1) // 2] = 1.0
    radius = math.sqrt(RADIUS_SQUARED)
    moved = math.hypot(
        blocks[0] * float(np.linalg.norm(gram.astype(np.float64) * twice)) / STEPS**2 / RADIUS_SQUARED,
        blocks[1] * float(np.linalg.norm(sums.astype(np.float64))) / STEPS / radius,
        blocks[2] * float(np.linalg.norm(counts.astype(np.float64))) / STEPS,
    )
    bound = compute_replacement(width, blocks) if replaced else compute_sensitivity(width, blocks)
    return Bound(field, moved, bound * (1 + 1e-9))


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


def _of_digests(first: Mapping[str, Any], second: Mapping[str, Any], experiment: Experiment) -> Bound | None:
    digests, name = experiment.digests, "DigestReply.digests/features"
    assert digests is not None
    if first[name].shape != second[name].shape:
        return None
    weight = 1 / digests.per_digest
    apart = first[name].astype(np.float64) - second[name]
    if digests.protection == "gauss":
        assert digests.norm is not None
        bound = compute_digest_l2_sensitivity(digests.norm, weight, non_negative=True)
        return Bound("DigestReply.digests", float(np.linalg.norm(apart)), bound * (1 + ROUNDING))
    if digests.protection == "laplace":
        assert digests.largest is not None
        bound = compute_digest_l1_sensitivity(apart[0].size, digests.largest, weight)
        return Bound("DigestReply.digests", float(np.abs(apart).sum()), bound * (1 + 10 * ROUNDING))
    return None


def _apart(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> float:
    return float(np.linalg.norm(first[name].astype(np.float64) - second[name]))


def _signed(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> Any:
    return first[name] - second[name]
