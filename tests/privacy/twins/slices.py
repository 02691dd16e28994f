"""Experiments as small slices whose data lie at the sites: what a site does, and little of it."""

from collections.abc import Mapping
from typing import Any

from tests.privacy.twins.records import Records, columns_of, drawn

CLASSES = ["c0", "c1", "c2", "c3"]
OF_EACH = 8
"""Records of a class at a site."""
PIXELS = 8
COLUMNS = 5


def sliced(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same learner, strategy and protection over four classes and two tasks, with data at the sites."""
    strategy = settings["strategy"]
    sums = (strategy if isinstance(strategy, str) else strategy["name"]) == "analytic"
    found: dict[str, Any] = {**settings, "data": _data(settings["data"]["source"] in ("npz", "csv"))}
    one = settings["tasks"].get("count", 0) == 1
    found["tasks"] = {"count": 1 if one else 2, "order": "natural", "rounds": 1 if sums else 2}
    if "learner" in settings:
        found["learner"] = {**settings["learner"], "epochs": 1, "batch_size": 8}
    private = settings.get("privacy", {}).get("mode", "none") != "none"
    found["evaluation"] = {**settings.get("evaluation", {}), "central": False, "federated": not private}
    if private and "digests" in settings:
        found["data"] |= {"test_fraction": 0, "validation_fraction": 0}
    return found


def _data(table: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"source": "csv" if table else "folder", "classes": CLASSES}
    found |= {"test_fraction": 0.25, "validation_fraction": 0.25}
    if table:
        names = columns_of(COLUMNS)
        constants = {"mean": dict.fromkeys(names, 0.0), "std": dict.fromkeys(names, 1.0)}
        return found | {"columns": dict.fromkeys(names, "numeric"), "normalise": constants}
    return found | {"image_size": PIXELS, "color": "gray", "normalise": {"mean": 0.5, "std": 0.25}}


def data_of(settings: Mapping[str, Any], *, patients: bool = False, form: str = "npz") -> dict[str, Records]:
    """The sites of a slice and what they hold; the first one has the twin."""
    table = settings["data"]["source"] == "csv"
    shape = (COLUMNS,) if table else (PIXELS, PIXELS)
    form = "csv" if table else form
    names = [
        f"site-{index}" for index in range(3 if "secure" in settings or "groups" in str(settings) else 2)
    ]
    return {name: drawn(1, name, shape, CLASSES, OF_EACH, patients=patients, form=form) for name in names}
