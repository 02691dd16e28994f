"""What twins are run of: protections, and branches at which a record may stand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.privacy.twins.slices import sliced


@dataclass(frozen=True)
class Case:
    """One federation and which pairs it gets: usual, few, or the branch that its data or policy stand at."""

    name: str
    settings: Mapping[str, Any]
    pairs: str = "usual"
    patients: bool = False


BASE: dict[str, Any] = {
    "name": "twins",
    "seed": 1,
    "data": {"source": "digits"},
    "tasks": {"count": 2},
    "model": {"name": "mlp", "hidden": [8], "norm": "none"},
    "learner": {"preset": "none", "optimizer": {"name": "sgd", "lr": 0.2}},
    "strategy": "fedavg",
}
MEMORY = {"memory": {"selection": "random", "share": 0.5}}
HERDED = {"memory": {"selection": "herding", "per_class": 2}}
LOCAL = {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0}
SAMPLE = LOCAL | {"mode": "sample", "sample_rate": 0.5}
SECURE = {"least": 3, "quorum": 3, "assumed_colluders": 0}


def of(name: str, *, learner: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """BASE with other blocks, as a slice."""
    whole = BASE | {"name": name} | changes
    whole["learner"] = BASE["learner"] | dict(learner or {})
    found = sliced(whole)
    found["evaluation"] = {"central": False, "federated": "privacy" not in changes}
    found["evaluation"] |= changes.get("evaluation", {})
    return found


MODES: dict[str, dict[str, Any]] = {
    "none": of("none", learner=HERDED),
    "none, masked": of("masked", secure=SECURE),
    "client_local": of("local", privacy=LOCAL, learner=HERDED),
    "sample": of("sample", privacy=SAMPLE, learner=MEMORY),
    "sample, counts": of(
        "sample-counts", privacy=SAMPLE, evaluation={"federated": True, "noise_multiplier": 2.0}
    ),
}
CASES = [
    Case("none, masked", MODES["none, masked"]),
    Case("client_local, at the floor", MODES["client_local"], "floor"),
    Case("patient", of("patient", privacy=SAMPLE | {"unit": "patient"}, learner=MEMORY), "patients", True),
    Case(
        "refused by normalisation",
        MODES["none"]
        | {"data": {key: value for key, value in MODES["none"]["data"].items() if key != "normalise"}},
        "few",
    ),
]
