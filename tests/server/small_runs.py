"""Small runs of strangers' data of every kind, with every kind of method, for tests that stop them."""

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
        "strategy": {"name": "multi_factor", "alpha": 0.7, "beta": 0.1, "gamma": 0.1, "delta": 0.1},
    },
    "ring": {"learner": SGD, "strategy": {"name": "serial_ring", "segments": 2}},
    "analytic": {
        "tasks": {"count": 3, "rounds": 1},
        "model": {"name": "features", "features": [{"name": "random", "width": 30}]},
        "strategy": {"name": "analytic", "head": "ridge", "shrinkage": "gcv"},
    },
}


@dataclass(frozen=True)
class SmallRun:
    """One experiment of three tasks of two classes, with data of its own.

    Attributes:
        data: A key of DATA.
        method: A key of METHODS.
        workers: Processes over which its sites are spread.
    """

    data: str
    method: str
    workers: int = 1

    def write(self, folder: Path) -> Path:
        """Write the experiment's file, and its data next to it."""
        content: dict[str, Any] = {
            "name": "run",
            "seed": 3,
            "data": DATA[self.data](folder, CLASSES),
            "tasks": {"count": 3, "rounds": 2},
            "model": MODEL,
            **METHODS[self.method],
        }
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path
