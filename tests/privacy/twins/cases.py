"""What twins are run of: every protection, request and branch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.privacy.twins.slices import sliced


@dataclass(frozen=True)
class Case:
    """One federation and which pairs it gets.

    pairs: usual, few, or the branch that its data or policy stand at. policy: of the first site, beside one
    that refuses nothing. runs: one behind the other. crash: after so many answers of the first site the
    server dies, and the run is resumed.
    """

    name: str
    settings: Mapping[str, Any]
    pairs: str = "usual"
    policy: Mapping[str, Any] = field(default_factory=dict)
    patients: bool = False
    form: str = "npz"
    runs: int = 1
    crash: int | None = None


BASE: dict[str, Any] = {
    "name": "twins",
    "seed": 1,
    "data": {"source": "digits"},
    "tasks": {"count": 2},
    "model": {"name": "mlp", "hidden": [8], "norm": "none"},
    "learner": {"preset": "none", "optimizer": {"name": "sgd", "lr": 0.2}},
    "strategy": "fedavg",
}
TABLE = {"source": "npz"}
MEMORY = {"memory": {"selection": "random", "share": 0.5}}
HERDED = {"memory": {"selection": "herding", "per_class": 2}}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0}
CENTRAL = LOCAL | {"mode": "client_central"}
SHARED = LOCAL | {"mode": "client_shared", "accountant": "rdp", "noise_multiplier": 2.0}
SAMPLE = LOCAL | {"mode": "sample", "sample_rate": 0.5}
SUMS = {"mode": "sample", "release": "sums", "noise_multiplier": 1.0}
SUMS_SHARED = SUMS | {"mode": "sample_shared", "accountant": "rdp"}
SECURE = {"least": 3, "quorum": 3, "assumed_colluders": 0}
CLOSED = {
    "model": {"name": "features", "features": ["inputs"]},
    "strategy": {"name": "analytic", "head": "gaussian"},
    "learner": None,
}
CLEAR_SUMS = CLOSED | {"strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.1}}
TWO_BRANCHES = {
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "strategy": {"name": "digest_synthesis", "base": "fedavg", "server_epochs": 1},
}
NOISY = {"federated": True, "noise_multiplier": 2.0}


def of(name: str, *, learner: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """BASE with other blocks, as a slice."""
    blocks = {key: value for key, value in changes.items() if value is not None}
    whole = BASE | {"name": name} | blocks
    if learner is not None:
        whole["learner"] = BASE["learner"] | dict(learner)
    if "learner" in changes and changes["learner"] is None:
        del whole["learner"]
    found = sliced(whole)
    private = "privacy" in changes and changes["privacy"]["mode"] != "none"
    found["evaluation"] = {"central": False, "federated": not private, **changes.get("evaluation", {})}
    for block in ("data", "tasks"):
        found[block] |= {
            key: value for key, value in changes.get(block, {}).items() if key not in ("source", "count")
        }
    return found


def _protected(name: str, privacy: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    secure = {"secure": SECURE} if "shared" in privacy["mode"] else {}
    learner = changes.pop("learner", {} if "strategy" not in changes else None)
    return of(name, privacy=privacy, learner=learner, **(secure | changes))


def _closed(name: str, **changes: Any) -> dict[str, Any]:
    found = of(name, **{key: value for key, value in (CLOSED | changes).items() if key != "learner"})
    found.pop("learner", None)
    return found


MODES: dict[str, dict[str, Any]] = {
    "none": of("none", learner=HERDED),
    "none, prediction sets": of(
        "sets", data={"source": "digits", "calibration_fraction": 0.25}, evaluation={"coverage": 0.8}
    ),
    "none, own class means": of("own-means", learner=HERDED | {"classifier": "nearest_mean"}),
    "none, masked": of("masked", secure=SECURE),
    "none, control variates": of("scaffold", strategy="scaffold"),
    "none, dynamic regularisation": of("feddyn", strategy="feddyn"),
    "none, ring of segments": of("ring", strategy={"name": "serial_ring", "segments": 2}),
    "none, closed form": _closed("closed", strategy=CLEAR_SUMS["strategy"]),
    "none, closed form, masked": _closed("closed-masked", strategy=CLEAR_SUMS["strategy"], secure=SECURE),
    "none, class counts": _closed(
        "counts", strategy={"name": "analytic", "head": "balanced_ridge", "shrinkage": 0.1}
    ),
    "none, head chosen": _closed("chosen", strategy={"name": "analytic", "head": "auto"}),
    "none, digests": of("digests", digests={"per_digest": 2}, **TWO_BRANCHES),
    "none, digests by the paper's noise": of(
        "digests-paper", digests={"per_digest": 2, "protection": "paper", "epsilon": 1.0}, **TWO_BRANCHES
    ),
    "none, digests in Laplace noise": of(
        "digests-laplace",
        digests={"per_digest": 2, "protection": "laplace", "epsilon": 4.0, "largest": 1.0},
        **TWO_BRANCHES,
    ),
    "none, digests in Gaussian noise": of(
        "digests-gauss",
        digests={
            "per_digest": 2,
            "protection": "gauss",
            "epsilon": 4.0,
            "norm": 1.0,
            "label_epsilon": 2.0,
        },
        **TWO_BRANCHES,
    ),
    "client_local": _protected("local", LOCAL, learner=HERDED),
    "client_local, counts": _protected("local-counts", LOCAL, evaluation=NOISY | {"clip_counts": 4.0}),
    "client_central": _protected("central", CENTRAL, learner=HERDED),
    "client_central, counts": _protected("central-counts", CENTRAL, evaluation=NOISY | {"clip_counts": 4.0}),
    "client_shared": _protected("shared", SHARED),
    "client_shared, counts": _protected("shared-counts", SHARED, evaluation=NOISY | {"clip_counts": 4.0}),
    "sample": _protected("sample", SAMPLE, learner=MEMORY),
    "sample, counts": _protected("sample-counts", SAMPLE, evaluation=NOISY),
    "sample, sparsity": _protected(
        "sample-sparsity",
        SAMPLE,
        strategy={
            "name": "clustered_personalisation",
            "base": "fedavg",
            "global_rounds": 1,
            "clusters": 2,
            "sparsity_epsilon": 4.0,
            "personal": [],
        },
        tasks={"count": 1},
        model={"name": "small_cnn", "norm": "none"},
    ),
    "sample, digests": _protected(
        "sample-digests",
        SAMPLE,
        digests={
            "per_digest": 2,
            "protection": "laplace",
            "epsilon": 4.0,
            "largest": 1.0,
            "label_epsilon": 2.0,
        },
        **TWO_BRANCHES,
    ),
    "sample, sums": _closed("sums", privacy=SUMS),
    "sample, sums and counts": _closed("sums-counts", privacy=SUMS, evaluation=NOISY),
    "sample_shared, sums": _closed("sums-shared", privacy=SUMS_SHARED, secure=SECURE),
    "sample_shared, sums and counts": _closed(
        "sums-shared-counts", privacy=SUMS_SHARED, secure=SECURE, evaluation=NOISY
    ),
}
PATIENTS = {
    "patient": _protected("patient", SAMPLE | {"unit": "patient"}, learner=MEMORY),
    "patient, counts": _protected("patient-counts", SAMPLE | {"unit": "patient"}, evaluation=NOISY),
    "patient, none": of("patients", learner=HERDED),
}
BUDGET = {"require_privacy": "sample", "max_epsilon": 6.0, "delta": 1e-4}
SITE_BUDGET = {"require_privacy": "client_local", "max_epsilon": 30.0, "delta": 1e-3}


def cases() -> list[Case]:
    """All of them, in order."""
    found = [Case(name, settings) for name, settings in MODES.items()]
    found += [Case(name, settings, patients=True, pairs="patients") for name, settings in PATIENTS.items()]
    for name in ("none", "sample", "sample, counts", "client_local", "sample, sums", "none, closed form"):
        settings = MODES[name]
        found.append(Case(f"{name}, only of its class", settings, "only of its class"))
        found.append(Case(f"{name}, at the floor", settings, "floor"))
        found.append(Case(f"{name}, unreadable file", settings, "unreadable", form="folder"))
        found.append(Case(f"{name}, two runs", settings, "few", runs=2))
    for name in ("none", "sample", "client_local"):
        table = MODES[name] | {"data": sliced(BASE | {"data": TABLE})["data"]}
        found.append(Case(f"{name}, table", table, "table"))
        found.append(Case(f"{name}, resumed", MODES[name], "few", crash=3))
    found.append(Case("sample, budget spent", MODES["sample, counts"], pairs="few", policy=BUDGET, runs=2))
    found.append(Case("sums, budget spent", MODES["sample, sums"], pairs="few", policy=BUDGET, runs=3))
    found.append(
        Case("client_local, budget spent", MODES["client_local"], pairs="few", policy=SITE_BUDGET, runs=2)
    )
    found.append(
        Case("refused by protection", MODES["none"], pairs="few", policy=BUDGET | {"max_epsilon": 8.0})
    )
    found.append(Case("refused by answers", MODES["none"], pairs="few", policy={"answers": ["train"]}))
    without = MODES["none"]["data"].items()
    found.append(
        Case(
            "refused by normalisation",
            MODES["none"] | {"data": {key: value for key, value in without if key != "normalise"}},
            "few",
        )
    )
    return found
