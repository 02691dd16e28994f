"""Experiments as small slices whose data lie at the sites: what a site does, and little of it."""

from collections.abc import Mapping
from typing import Any

from tests.privacy.twins.records import Records, drawn

CLASSES = ["c0", "c1", "c2", "c3"]
OF_EACH = 8
"""Records of a class at a site."""
PIXELS = 8
DATA: Mapping[str, Any] = {
    "source": "folder",
    "classes": CLASSES,
    "test_fraction": 0.25,
    "validation_fraction": 0.25,
    "image_size": PIXELS,
    "color": "gray",
    "normalise": {"mean": 0.5, "std": 0.25},
}


def sliced(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same learner, strategy and protection over four classes and two tasks, with data at the sites."""
    found: dict[str, Any] = {**settings, "data": dict(DATA)}
    found["tasks"] = {"count": 2, "order": "natural", "rounds": 2}
    found["learner"] = {**settings["learner"], "epochs": 1, "batch_size": 8}
    return found


def data_of(settings: Mapping[str, Any], *, patients: bool = False) -> dict[str, Records]:
    """The sites of a slice and what they hold; the first one has the twin."""
    names = [f"site-{index}" for index in range(3 if "secure" in settings else 2)]
    return {name: drawn(1, name, (PIXELS, PIXELS), CLASSES, OF_EACH, patients=patients) for name in names}
