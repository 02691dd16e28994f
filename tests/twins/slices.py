"""Committed experiments as small slices whose data lie at the sites: what a site does, and little of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perennial.config.experiment import Experiment
from tests.twins.records import Records, columns_of, drawn

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml"))
CLASSES = ["c0", "c1", "c2", "c3"]
OF_EACH = 8
"""Records of a class at a site."""
PIXELS = 8
COLUMNS = 5


def committed(name: str) -> dict[str, Any]:
    """The settings of a committed experiment."""
    return yaml.safe_load((ROOT / "experiments" / f"{name}.yaml").read_text(encoding="utf-8"))


def sliced(settings: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The same learner, strategy and protection over four classes and two tasks, with data at the sites.

    Networks keep their kind and lose their width; pretrained maps become random ones, because weights
    are not at hand. changes: blocks that are other ones; None leaves a block out.
    """
    found = {key: value for key, value in settings.items() if key not in ("adversaries", "rounds")}
    table = settings["data"]["source"] in ("npz", "csv")
    sums = _strategy(settings)["name"] == "analytic"
    found["data"] = _data(settings["data"], table)
    one = settings["tasks"].get("count", 0) == 1
    found["tasks"] = {"count": 1 if one else 2, "order": "natural", "rounds": 1 if sums else 2}
    found["model"] = _model(settings["model"])
    found["strategy"] = _strategy(settings)
    if "learner" in settings:
        learner = found["learner"] = {**settings["learner"], "epochs": 1}
        learner["batch_size"] = 8
        if "memory" in learner and "per_class" in learner["memory"]:
            learner["memory"] = learner["memory"] | {"per_class": min(3, learner["memory"]["per_class"])}
    if "digests" in settings:
        drawn_from_sums = settings["digests"].get("kind") == "statistics"
        found["digests"] = settings["digests"] | {"per_digest": 1 if drawn_from_sums else 2}
    if "secure" in settings:
        found["secure"] = settings["secure"] | {"least": 3, "quorum": 3, "assumed_colluders": 0}
    if "absence" in settings:
        found["absence"] = [{"site": "site-1", "first_round": 2}]
    if "pretraining" in settings:
        found["pretraining"] = {"samples": 6, "rounds": 1}
    evaluation = {**settings.get("evaluation", {}), "central": False}
    private = settings.get("privacy", {}).get("mode", "none") != "none"
    found["evaluation"] = evaluation | {"federated": not private}
    found |= changes
    return {key: value for key, value in found.items() if value is not None}


def _data(data: Mapping[str, Any], table: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "source": "csv" if table else "folder",
        "classes": CLASSES,
        "test_fraction": 0.25,
        "validation_fraction": 0.25,
    }
    if table:
        names = columns_of(COLUMNS)
        found["columns"] = dict.fromkeys(names, "numeric")
        found["normalise"] = {"mean": dict.fromkeys(names, 0.0), "std": dict.fromkeys(names, 1.0)}
    else:
        found |= {"image_size": PIXELS, "color": "gray", "normalise": {"mean": 0.5, "std": 0.25}}
        if "augmentation" in data:
            found["augmentation"] = {"crop_padding": 1, "flip": True}
    return found


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(model)
    if found["name"].startswith("resnet"):
        found = {"name": "small_cnn"}
    if str(found.get("backbone", "")).startswith("resnet"):
        found["backbone"] = "small_cnn"
    if "features" in found and isinstance(found["features"], list):
        found["features"] = [_map(each) for each in found["features"]]
    if "projection" in found:
        found |= {"features": ["inputs"], "projection": 6}
    if "hidden" in found:
        found["hidden"] = [8]
    return found


def _map(features: Any) -> Any:
    if isinstance(features, str):
        return features
    if features["name"] == "pretrained":
        return {"name": "random", "width": 12}
    if features["name"] == "patches":
        kept = {key: value for key, value in features.items() if key in ("name", "symmetry", "power")}
        return kept | {"filters": 6, "size": 4}
    return features | {"width": 12}


def _strategy(settings: Mapping[str, Any]) -> dict[str, Any]:
    strategy = settings.get("strategy", "fedavg")
    found: dict[str, Any] = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    if "global_rounds" in found:
        found["global_rounds"] = 1
    if "groups" in found:
        found["groups"] = [["site-0", "site-1"], ["site-2"]]
    for key, most in (("samples", 8), ("steps", 2), ("server_epochs", 1), ("channels", 4), ("every", 1)):
        if key in found:
            found[key] = min(found[key], most)
    if found["name"] == "contribution":
        found["utility"] = "accuracy"  # which the sites can tell
    if isinstance(found.get("base"), Mapping):
        found["base"] = _strategy({"strategy": found["base"]})
    if "segments" in found:
        found["segments"] = min(2, found["segments"])
    return found


def data_of(settings: Mapping[str, Any], *, patients: bool = False, form: str = "npz") -> dict[str, Records]:
    """The sites of a slice and what they hold; the first one has the twin."""
    table = settings["data"]["source"] == "csv"
    shape = (COLUMNS,) if table else (PIXELS, PIXELS)
    form = "csv" if table else form
    names = [
        f"site-{index}" for index in range(3 if "secure" in settings or "groups" in str(settings) else 2)
    ]
    return {name: drawn(1, name, shape, CLASSES, OF_EACH, patients=patients, form=form) for name in names}


def valid(settings: Mapping[str, Any]) -> Experiment:
    """The settings, checked. Raises pydantic's ValidationError."""
    return Experiment.model_validate(dict(settings))
