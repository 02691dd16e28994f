"""What a hospital gains: alone, with others, with others under protection, and with all data in one place."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perennial.benchmarks.table import Measure, Row, Table, of
from perennial.benchmarks.tables.own_data import CODES, NATURAL, SHARED, final_balanced

FEDERATED, PROTECTED, POOLED = "federated", "federated, epsilon 8", "pooled"
MULTIPLIER = 0.64
"""Of one Gaussian release with epsilon 8 at delta 1e-5, by Renyi orders."""
SITE_BY_SITE = "strategy={name: analytic, head: gaussian, shrinkage: 0.1}"
"""Shrinkage is not chosen anew at each place: one site alone may have no validation sample of a class."""


@dataclass(frozen=True)
class Place:
    """Data of several sites.

    small: features for sums with noise, which grows with their number. public: constants that stand for what
    would otherwise be taken from the data, under protection.
    """

    name: str
    experiment: str
    data: Mapping[str, Any]
    tasks: Mapping[str, Any]
    features: Sequence[Mapping[str, Any]]
    small: Sequence[Mapping[str, Any]]
    sites: Sequence[str]
    public: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """All together, under protection, pooled, and each site alone."""
        pooled = self._changes(self.features, {**self.data, "sites": 1, "partition": {"kind": "iid"}})
        return [
            self._row(FEDERATED, *self._changes(self.features, self.data)),
            self._row(
                PROTECTED, *self._changes(self.small, {**self.data, **self.public}), *_noise(len(self.sites))
            ),
            self._row(POOLED, *pooled),
            *(
                self._row(f"{site} alone", *self._changes(self.features, self.data), self._without(site))
                for site in self.sites
            ),
        ]

    def _row(self, label: str, *changes: str) -> Row:
        return Row(f"{self.name}: {label}", self.experiment, ("evaluation.federated=false", *changes))

    def _changes(self, features: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> tuple[str, ...]:
        model = {"name": "features", "features": list(features)}
        return (
            f"data={json.dumps(data)}",
            f"tasks={json.dumps(self.tasks)}",
            f"model={json.dumps(model)}",
            SITE_BY_SITE,
        )

    def _without(self, site: str) -> str:
        others = [{"site": other, "first_round": 1} for other in self.sites if other != site]
        return f"absence={json.dumps(others)}"


def _noise(sites: int) -> tuple[str, ...]:
    privacy = {
        **{"mode": "sample_shared", "release": "sums", "noise_multiplier": MULTIPLIER},
        **{"accountant": "rdp", "noise_source": "seeded"},
    }
    secure = {"least": sites, "quorum": sites, "assumed_colluders": 1}
    ridge = "strategy={name: analytic, head: ridge, shrinkage: 1.0e-6, standardise: false}"
    return f"privacy={json.dumps(privacy)}", f"secure={json.dumps(secure)}", ridge


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
PLACES = (
    Place(
        "digits, 5 sites",
        "analytic_digits",
        {"source": "digits", "sites": 5, "partition": {"kind": "dirichlet", "alpha": 0.5, "min_samples": 10}},
        {"count": 5, "rounds": 1},
        [{"name": "random", "width": 1500}],
        [{"name": "random", "width": 64}],
        DIVIDED,
    ),
    Place(
        "skin lesions, 4 clinics",
        "analytic_ham10000",
        {"source": "pack", "path": f"{SHARED}/ham10000_32.webp.zip", "partition": NATURAL},
        {"increments": [3, 2, 2], "rounds": 1},
        [{"name": "patches", "filters": 100, "size": 8}],
        [{"name": "patches", "filters": 20, "size": 8}],
        CLINICS,
    ),
    Place(
        "heart disease, 4 hospitals",
        "own_data",
        {
            **{"source": "csv", "path": f"{SHARED}/heart_disease_4_hospitals.csv", "partition": NATURAL},
            **{"label_column": "diagnosis", "site_column": "hospital", "column_kinds": CODES},
        },
        {"count": 1, "rounds": 1},
        [{"name": "random", "width": 1000}],
        [{"name": "random", "width": 32}],
        HOSPITALS,
        PUBLIC,
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
        note="Each row is one model, measured on the test records of all sites. Alone: the others never "
        "answer. Protected: mode `sample_shared`, one training record hidden from the server and "
        "one other site together, by noise that sites share under secure aggregation; fewer features, "
        "because noise grows with their number, and ridge, the one head that noise allows, which leaves rare "
        "classes out. Features and the shrinkage of 0.1 were fixed beforehand.",
    )
}
