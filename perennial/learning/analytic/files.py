"""Sums in files: a site's of one task, and those of records that it withdraws, task by task."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from perennial.foundation.errors import StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.tensor_file import pieces
from perennial.learning.analytic.statistics import Statistics

PARTS = ("gram", "sums", "counts")


def write_statistics(path: Path, statistics: Statistics, facts: Mapping[str, Any]) -> None:
    """Keep statistics, whole or not at all. facts: JSON-able."""
    make_folder(path.parent)
    _write(path, _tensors(statistics, ""), {**facts, "classes": _bounds(statistics)})


def read_statistics_file(path: Path) -> tuple[Statistics, dict[str, Any]]:
    """(statistics, facts) of a file. Raises StateError naming it when it is missing or damaged."""
    tensors, facts = _read(path)
    try:
        return _statistics(tensors, "", facts["classes"]), facts
    except (KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path}: missing or damaged ({error!r})") from error


def write_by_task(path: Path, by_task: Mapping[int, Statistics], facts: Mapping[str, Any]) -> None:
    """Write the statistics of several tasks to one file, whole or not at all. facts: JSON-able."""
    tensors = {k: t for task, part in by_task.items() for k, t in _tensors(part, f"{task}/").items()}
    tasks = {str(task): _bounds(part) for task, part in by_task.items()}
    _write(path, tensors, {**facts, "tasks": tasks})


def read_by_task(path: Path) -> tuple[dict[int, Statistics], dict[str, Any]]:
    """(task -> statistics, facts) of a file. Raises StateError naming it when it is missing or damaged."""
    tensors, facts = _read(path)
    try:
        found = {int(task): _statistics(tensors, f"{task}/", b) for task, b in facts["tasks"].items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StateError(f"{path}: missing or damaged ({error!r})") from error
    return found, facts


def _bounds(statistics: Statistics) -> list[int]:
    return [statistics.classes.start, statistics.classes.stop]


def _tensors(statistics: Statistics, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{part}": getattr(statistics, part) for part in PARTS}


def _statistics(tensors: Mapping[str, Tensor], prefix: str, bounds: list[int]) -> Statistics:
    first, end = bounds
    gram, sums, counts = (tensors[f"{prefix}{part}"] for part in PARTS)
    return Statistics(gram, sums, counts, range(first, end))


def _write(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    replace_file(path, pieces(tensors, {"facts": json.dumps(facts)}))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            return {key: file.get_tensor(key) for key in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path}: missing or damaged ({error})") from error
