"""Data of real hospitals for benchmarks/natural_hospitals.py, each as an .npz file.

FLamby: Ogier du Terrail et al. 2022 (arXiv 2210.04620).
"""

import csv
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import ROOT
from benchmarks.tables.hospital_gains import LEVELS, USUAL
from perennial.data.pack import pack_arrays

SHARED = ROOT.parent / "shared" / "data"
MADE = ROOT / "build" / "natural_hospitals"
BLOOD_CELLS = MADE / "white_blood_cells.npz"
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
CODES = ("cp", "restecg")
"""Columns that FLamby keeps: not slope, ca and thal, and no patient who lacks one of the others."""
TRAIN, SPLIT_SEED = 0.66, 43
"""FLamby's share of training records at each hospital, and the seed of its division."""


@dataclass(frozen=True)
class Place:
    """One set of data of several hospitals.

    make: writes its .npz file, with x, y, site, and x_test, y_test, site_test where a fold is given.
    data: what the experiment says of them beside source and path.
    features: models of the closed form, without and with noise.
    averaged: network, learner and rounds of averaging; None: not run.
    published: what others report, in words.
    """

    name: str
    title: str
    make: Callable[[Path], None]
    data: Mapping[str, Any]
    features: tuple[Mapping[str, Any], Mapping[str, Any]]
    averaged: Mapping[str, Any] | None = None
    published: str = ""

    @property
    def path(self) -> Path:
        """Of the file that make writes."""
        return MADE / f"{self.name.replace(' ', '_')}.npz"


def heart(path: Path) -> None:
    """740 patients of four hospitals, diseased or not, with FLamby's fold: 486 to learn from."""
    from sklearn.model_selection import train_test_split

    with (SHARED / "heart_disease_4_hospitals.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] for name in (*NUMBERS, *CODES))]
    sites = np.array([row["hospital"] for row in rows])
    y = np.array([int(int(row["diagnosis"]) > 0) for row in rows])
    x = np.array([_patient(row) for row in rows], dtype=np.float32)
    test = np.zeros(len(rows), dtype=bool)
    for site in dict.fromkeys(sites.tolist()):
        here = np.flatnonzero(sites == site)
        # as FLamby does: by diagnosis, but where one of the two has two patients or fewer
        by = y[here] if min(np.bincount(y[here], minlength=2)) > 2 else None
        _, held = train_test_split(
            np.arange(len(here)), test_size=1 - TRAIN, train_size=TRAIN, random_state=SPLIT_SEED, stratify=by
        )
        test[here[held]] = True
    _write(path, x, np.array(["healthy", "diseased"])[y], sites, test)


def _patient(row: Mapping[str, str]) -> list[float]:
    numbers = [float(row[name]) for name in NUMBERS]
    # one column a code but the first one, as FLamby does
    return numbers + [float(float(row[name]) == float(level)) for name in CODES for level in LEVELS[name][1:]]


def lesions(path: Path) -> None:
    """10,015 skin images of four clinics, 32 pixels, seven classes, with FLamby's fold."""
    pack = SHARED / "ham10000_32.webp.zip"
    with zipfile.ZipFile(pack) as file:
        meta = json.loads(file.read("meta.json"))
    held = pack_arrays(pack, ("x", "y", "site", "flamby_test"))
    classes, names = np.array(meta["class_names"]), np.array(meta["site_names"])
    _write(path, held["x"], classes[held["y"]], names[held["site"]], held["flamby_test"].astype(bool))


def genes(path: Path) -> None:
    """102 tumours of four kinds, 5,565 genes each (Su et al. 2001); the data name no hospital."""
    held = np.load(SHARED / "tabular_multiclass.npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=held["su_x"], y=held["su_y"])


def blood_cells(path: Path) -> None:
    """Nothing: benchmarks/blood_cells.py writes it from pictures that a user has."""


def _write(path: Path, x: np.ndarray, y: np.ndarray, sites: np.ndarray, test: np.ndarray) -> None:
    parts = {"x": x, "y": y, "site": sites}
    path.parent.mkdir(parents=True, exist_ok=True)
    train: dict[str, Any] = {name: values[~test] for name, values in parts.items()}
    held: dict[str, Any] = {f"{name}_test": values[test] for name, values in parts.items()}
    np.savez(path, **train, **held)


_PATCHES: Mapping[str, Any] = {"name": "patches", "filters": 100, "size": 8}
_PICTURES = (
    {"features": [_PATCHES]},
    {
        "features": [{**_PATCHES, "filters": 400, "symmetry": "mirror", "power": 0.5}],
        "projection": {"width": 96},
    },
)
_INPUTS = ({"name": "inputs"},)
_GENES = ({"name": "random", "width": 64},)
_FLAT: Mapping[str, Any] = {"tasks": {"count": 1, "rounds": 10}}
_USUAL = [USUAL[name] for name in NUMBERS] + [(0.5, 0.5)] * sum(len(LEVELS[name]) - 1 for name in CODES)
PLACES = (
    Place(
        "heart disease",
        "Heart disease at FLamby's fold and task: diseased or not, four hospitals, 486 training patients",
        heart,
        {
            "partition": {"kind": "natural"},
            "normalise": {"mean": [m for m, _ in _USUAL], "std": [d for _, d in _USUAL]},
        },
        ({"features": list(_INPUTS)}, {"features": list(_INPUTS)}),
        {
            "tasks": {"count": 1, "rounds": 50},
            "model": {"name": "mlp", "hidden": []},
            "learner": {"preset": "none", "batch_size": 4, "optimizer": {"name": "adam", "lr": 0.001}},
        },
        "FLamby's published accuracies of its logistic regression, on the same records: FedAvg 68.5, its "
        "best federated method 73.1, pooled 73.5. Averaging here has its network, batches and optimiser, 50 "
        "rounds of one epoch.",
    ),
    Place(
        "skin lesions",
        "HAM10000's four clinics at FLamby's fold, 32 px, seven classes, 8,012 images to learn from",
        lesions,
        {"partition": {"kind": "natural"}},
        _PICTURES,
        published="FLamby reports Fed-ISIC2019, of which these clinics are four of six, with an EfficientNet "
        "on larger images: no figure of it is comparable.",
    ),
    Place(
        "white blood cells",
        "White blood cells of five kinds in laboratories that differ, 32 px",
        blood_cells,
        {"partition": {"kind": "natural"}},
        _PICTURES,
    ),
    Place(
        "gene expression",
        "Gene expression of four kinds of tumour (Su et al. 2001), 102 samples of 5,565 genes; the five "
        "hospitals are drawn, Dirichlet 0.5",
        genes,
        {
            **{"sites": 5, "partition": {"kind": "dirichlet", "alpha": 0.5, "min_samples": 4}},
            "normalise": {"mean": 0.0, "std": 1.0},
        },
        ({"features": [{"name": "random", "width": 1000}]}, {"features": list(_GENES)}),
        {**_FLAT, "model": {"name": "mlp", "norm": "group"}},
    ),
)
