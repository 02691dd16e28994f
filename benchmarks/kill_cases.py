"""The runs that benchmarks/kills.py kills: strangers' data of every kind, with every kind of method."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

CLASSES = "abcdef"
MODEL = {"name": "mlp", "hidden": [6]}
SGD = {"preset": "none", "optimizer": {"lr": 0.05}}


# data: strangers' own, and the digits


def _digits(folder: Path, classes: str) -> dict[str, Any]:
    return {"source": "digits", "sites": 3, "samples_limit": 240, "partition": {"kind": "iid"}}


def _write_images(folder: Path, classes: str, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(12):
            rng = np.random.default_rng([ord(name), index, seed])
            level = 25 + 35 * CLASSES.index(name) + rng.normal(0, 8, (8, 8))
            pixels = level.clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"P{index // 2}_{index}.png")


def _folder(folder: Path, classes: str) -> dict[str, Any]:
    _write_images(folder / "images", classes, 0)
    return {"source": "folder", "path": str(folder / "images"), "color": "gray", "sites": 3}


def _own(folder: Path, classes: str) -> dict[str, Any]:
    """Each site's images in a folder of its own."""
    for seed, site in enumerate(("graz", "linz", "wien")):
        _write_images(folder / "own" / site, classes, seed)
    path = str(folder / "own")
    return {"source": "folder", "path": path, "color": "gray", "partition": {"kind": "natural"}}


def _rows(folder: Path, classes: str) -> str:
    rng = np.random.default_rng(5)
    rows = ["who,u,v,w,label"]
    for label, name in enumerate(classes):
        for index in range(24):
            values = rng.normal([label, -label, label % 2], 0.5)
            rows.append(f"P{label}{index // 3},{','.join(f'{value:.4f}' for value in values)},{name}")
    (folder / "rows.csv").write_text("\n".join(rows))
    return str(folder / "rows.csv")


def _table(folder: Path, classes: str) -> dict[str, Any]:
    columns = {"u": "numeric", "v": "numeric", "w": "numeric"}
    place = {"source": "csv", "path": _rows(folder, classes), "label_column": "label", "sites": 3}
    return {**place, "columns": columns}


def _patients(folder: Path, classes: str) -> dict[str, Any]:
    return {**_table(folder, classes), "patient": "who"}


DATA: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "digits": _digits,
    "folder": _folder,
    "table": _table,
    "patients": _patients,
    "own": _own,
}
METHODS: dict[str, dict[str, Any]] = {
    "replay": {"learner": {**SGD, "memory": {"selection": "random", "per_class": 3}}},
    "private": {
        "learner": {**SGD, "classification": "ce"},
        "privacy": {
            "mode": "client_local",
            "clip_norm": 0.5,
            "noise_multiplier": 4.0,
            "noise_source": "seeded",
        },
        "evaluation": {"federated": True, "noise_multiplier": 20.0, "clip_counts": 5.0},
    },
    "pp_fcil": {
        "model": {"name": "dual_backbone", "backbone": "mlp", "hidden": [6]},
        "learner": {
            **SGD,
            "classification": "balanced_softmax",
            "distillation": {"weight": 0.5, "temperature": 2.0},
            "contrastive": {"weight": 1.0, "temperature": 0.1},
            "memory": {"selection": "herding", "per_class": 3},
        },
        "strategy": {"name": "multi_factor"},
    },
    "ring": {"learner": SGD, "strategy": {"name": "serial_ring", "segments": 2}},
    "feddig": {
        "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [6]},
        "learner": SGD,
        "strategy": {"name": "digest_synthesis", "base": "fedavg", "server_epochs": 1},
        "digests": {"per_digest": 4, "mix": "within_class"},
        "absence": [{"site": "site-0", "first_round": 3}],
    },
    "clusters": {
        "learner": SGD,
        "strategy": {
            "name": "clustered_personalisation",
            "base": "fedavg",
            "global_rounds": 1,
            "personal": ["head"],
        },
    },
    "analytic": {
        "tasks": {"count": 3, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 30}]},
        "strategy": {"name": "analytic", "head": "ridge", "shrinkage": "gcv"},
    },
}
ALONE = {"clusters": "digits", "feddig": "digits"}
"""Methods that are tried on one kind of data: they need convolutional layers, or sites of known names."""


@dataclass(frozen=True)
class Case:
    """One experiment, over how many processes its sites are spread, and what else disturbs it."""

    data: str
    method: str
    workers: int = 1
    besides: str = ""
    """A key of BESIDES, or nothing."""

    @property
    def name(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return ", ".join((self.data, self.method, workers, *([self.besides] if self.besides else [])))

    def write(self, folder: Path) -> Path:
        """The experiment's file, with data of its own beside it."""
        content: dict[str, Any] = {
            "name": "run",
            "seed": 3,
            "data": DATA[self.data](folder, CLASSES[:4] if self.besides == "continued" else CLASSES),
            "tasks": {"count": 2 if self.besides == "continued" else 3, "rounds": 2},
            "model": MODEL,
            **METHODS[self.method],
        }
        if self.besides == "continued":
            content["tasks"] = {**content["tasks"], "count": 2}
        if self.besides == "absent":
            content["absence"] = [{"site": "site-1", "first_round": 3, "last_round": 4}]
        if self.besides in ("refused", "failed"):
            content["rounds"] = {"quorum": 3, "max_skipped": 1}
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def grow(self, folder: Path) -> None:
        """Two classes come to the data of a case that is continued."""
        DATA[self.data](folder, CLASSES)


BESIDES: dict[str, tuple[tuple[str, str], ...]] = {
    "refused": (
        ("digits", "replay"),
        ("digits", "private"),
        ("folder", "pp_fcil"),
        ("own", "replay"),
        ("table", "ring"),
        ("patients", "analytic"),
    ),
    "failed": (("digits", "private"), ("folder", "replay"), ("own", "pp_fcil"), ("table", "analytic")),
    "absent": (("digits", "replay"), ("folder", "pp_fcil"), ("table", "replay"), ("patients", "ring")),
    "continued": (("folder", "replay"), ("own", "pp_fcil"), ("table", "replay"), ("own", "analytic")),
    "killed twice": (
        ("digits", "private"),
        ("digits", "clusters"),
        ("folder", "pp_fcil"),
        ("own", "replay"),
        ("patients", "ring"),
    ),
}
"""What disturbs a run besides one kill, and the runs in which it is tried.

refused: at the first resume one of three sites, whose answers are all needed, refuses to train. failed: its
app fails instead. absent: the experiment says that a site is away for the second task. continued: two
classes come to the data of the finished run, which goes on. killed twice: the first resume is killed too.
"""


def cases() -> list[Case]:
    """All kinds of data with all methods that fit them in process, and a part of them in other ways."""
    found = [
        Case(data, method)
        for data in DATA
        for method in METHODS
        if ALONE.get(method, data) == data and (data, method) not in UNFIT
    ]
    two = [Case(data, method, 2) for data, method in TWO_WORKERS]
    more = [Case(data, method, 1, what) for what, those in BESIDES.items() for data, method in those]
    return [*found, *two, *more]


UNFIT = {("table", "private"), ("patients", "private")}
"""Rows are scaled by figures of the training data, which no protection covers."""
TWO_WORKERS = (
    ("digits", "replay"),
    ("folder", "pp_fcil"),
    ("table", "analytic"),
    ("digits", "private"),
    ("own", "private"),
)
"""Workers end with the server; what they were doing for their sites is cut off there."""
