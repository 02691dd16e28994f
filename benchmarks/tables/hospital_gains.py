"""What a hospital gains: alone, with others, with others under protection, and with all data in one place."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.table import Measure, Row, Table, of
from benchmarks.tables.analytic import ONE_RELEASE
from benchmarks.tables.own_data import CODES, NATURAL, SHARED, final_balanced

FEDERATED, PROTECTED, POOLED = "federated", "federated, epsilon 8", "pooled"
SITE_BY_SITE = "strategy={name: analytic, head: gaussian, shrinkage: 0.1}"
"""Shrinkage is not chosen anew at each place: one site alone may have no validation sample of a class."""


@dataclass(frozen=True)
class Place:
    """Data of several sites.

    noised: the experiment under protection and its changes, with features for sums with noise.
    """

    name: str
    experiment: str
    data: Mapping[str, Any]
    tasks: Mapping[str, Any]
    features: Sequence[Mapping[str, Any]]
    sites: Sequence[str]
    noised: tuple[str, Mapping[str, Any]]

    def rows(self) -> list[Row]:
        """All together, under protection, pooled, and each site alone."""
        pooled = self._changes({**self.data, "sites": 1, "partition": {"kind": "iid"}})
        noised, changes = self.noised
        return [
            self._row(FEDERATED, *self._changes(self.data)),
            Row(f"{self.name}: {PROTECTED}", noised, (*_noise(len(self.sites)), *_said(changes))),
            self._row(POOLED, *pooled),
            *(
                self._row(f"{site} alone", *self._changes(self.data), self._without(site))
                for site in self.sites
            ),
        ]

    def _row(self, label: str, *changes: str) -> Row:
        return Row(f"{self.name}: {label}", self.experiment, ("evaluation.federated=false", *changes))

    def _changes(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        model = {"name": "features", "features": list(self.features)}
        return *_said({"data": data, "tasks": self.tasks, "model": model}), SITE_BY_SITE

    def _without(self, site: str) -> str:
        others = [{"site": other, "first_round": 1} for other in self.sites if other != site]
        return f"absence={json.dumps(others)}"


def _said(changes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={json.dumps(value)}" for key, value in changes.items())


def _noise(sites: int) -> tuple[str, ...]:
    privacy = {
        **{"mode": "sample_shared", "release": "sums", "noise_multiplier": ONE_RELEASE[8]},
        **{"accountant": "rdp"},
    }
    return _said({"privacy": privacy, "secure": {"least": 3, "quorum": sites, "assumed_colluders": 1}})


DIVIDED = tuple(f"site-{number}" for number in range(5))
CLINICS = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
HOSPITALS = ("Cleveland", "Hungarian", "Switzerland", "VA Long Beach")
USUAL: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("sex", "fbs", "exang"), (0.5, 0.5)),
    **{"age": (54, 9), "trestbps": (132, 19), "chol": (230, 60), "thalach": (140, 25)},
    **{"oldpeak": (1, 1), "ca": (0.7, 0.9)},
}
"""Column -> usual value of grown people and deviation, as textbooks have them; not taken from the table."""
LEVELS = {"cp": "1234", "restecg": "012", "slope": "123", "thal": "367"}
PUBLIC = {
    "column_kinds": {},
    "columns": {**dict.fromkeys(USUAL, "numeric"), **{name: list(codes) for name, codes in LEVELS.items()}},
    "normalise": {
        "mean": {name: mean for name, (mean, _) in USUAL.items()},
        "std": {name: deviation for name, (_, deviation) in USUAL.items()},
    },
    "imputation": {name: mean for name, (mean, _) in USUAL.items()},
}
DIGITS = {
    **{"source": "digits", "sites": 5},
    "partition": {"kind": "dirichlet", "alpha": 0.5, "min_samples": 10},
}
HEART = {
    **{"source": "csv", "path": f"{SHARED}/heart_disease_4_hospitals.csv", "partition": NATURAL},
    **{"label_column": "diagnosis", "site_column": "hospital", "column_kinds": CODES},
}
PLACES = (
    Place(
        "digits, 5 sites",
        "analytic_digits",
        DIGITS,
        {"count": 5, "rounds": 1},
        [{"name": "random", "width": 1500}],
        DIVIDED,
        ("private_sums_digits", {"data": DIGITS, "tasks": {"count": 5, "rounds": 1}}),
    ),
    Place(
        "skin lesions, 4 clinics",
        "analytic_ham10000",
        {"source": "pack", "path": f"{SHARED}/ham10000_32.webp.zip", "partition": NATURAL},
        {"increments": [3, 2, 2], "rounds": 1},
        [{"name": "patches", "filters": 100, "size": 8}],
        CLINICS,
        ("private_sums_ham10000", {}),
    ),
    Place(
        "heart disease, 4 hospitals",
        "own_data",
        HEART,
        {"count": 1, "rounds": 1},
        [{"name": "random", "width": 1000}],
        HOSPITALS,
        (
            "own_data",
            {
                "data": {**HEART, **PUBLIC},
                "tasks": {"count": 1, "rounds": 1},
                "model": {"name": "features", "features": [{"name": "inputs"}]},
                "strategy": {"name": "analytic", "head": "gaussian"},
                "evaluation.federated": False,
            },
        ),
    ),
)
MEASURES: dict[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "final balanced accuracy": final_balanced,
}

TABLES = {
    "hospital_gains": Table(
        "What a hospital gains: closed form alone, together, together under protection, and pooled",
        [row for place in PLACES for row in place.rows()],
        measures=MEASURES,
        seeds=tuple(range(1000, 1010)),
        note="Each row is one model, measured on the test records of all sites. Alone: the others never "
        "answer. Protected: mode `sample_shared`, one training record hidden from the server and "
        "one other site together, by noise that sites share under secure aggregation; features for noised "
        "sums, as docs/private_sums.md says: pixels, components of patches, columns. Other features and the "
        "shrinkage of 0.1 were fixed beforehand.",
    )
}
