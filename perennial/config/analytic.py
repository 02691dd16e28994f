"""What `strategy: analytic` does unless it is told otherwise; the server and the sites read it here."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from perennial.config.schema import ExperimentFields

DEFAULT_SHRINKAGE: Mapping[str, float | str] = {
    "gaussian": 0.1,
    "ridge": "gcv",
    "balanced_ridge": "validation",
    "auto": "validation",
}
"""By head. Cross-validation counts samples: of classes of very different size it shrinks too little."""
GAMMAS = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7)
LAMBDAS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 2.0, 4.0)
"""Shrinkages that are tried if the experiment lists none."""
MOST_CANDIDATES = 60
"""Heads that `head: auto` compares at most."""
HEADS_OF_A_MAP = 15
"""Heads of one map alone or of several together that `head: auto` compares."""


def has_own_heads(experiment: "ExperimentFields") -> bool:
    """Whether a run's sites get heads of their own: those of a closed form whose data name their sites."""
    natural = experiment.data.partition.kind == "natural" and not experiment.data.only_at_sites
    return experiment.strategy.name == "analytic" and natural


def heads_compared(keys: Mapping[str, Any] | None) -> int:
    """Most heads that sites compare in a round. keys: of the strategy with sums; None: there is none."""
    if keys is not None and keys.get("head") == "auto":
        return MOST_CANDIDATES
    if keys is None or shrinkage_of(keys) != "validation":
        return 0
    tried = GAMMAS if (keys.get("head") or "gaussian") == "gaussian" else LAMBDAS
    return len(keys.get("shrinkages") or tried)


def uncovered(keys: Mapping[str, Any]) -> str:
    """Why no accountant covers what this head asks of sites under privacy; "" if one does.

    keys: of the strategy with sums.
    """
    head = keys.get("head") or "gaussian"
    if head == "balanced_ridge":
        return (
            "strategy.head: found 'balanced_ridge' with privacy; no bound on how much one sample moves "
            "weighted sums has been worked out; allowed: gaussian, ridge"
        )
    if shrinkage_of(keys) == "validation":
        found = "strategy.head: found 'auto'" if head == "auto" else "strategy.shrinkage: found 'validation'"
        return (
            f"{found} with privacy, where the counts of validation samples that choose would be a release "
            "of their own, exact and without a charge; allowed: head gaussian, or ridge with a number"
        )
    return ""


def shrinkage_of(keys: Mapping[str, Any]) -> float | str:
    """The shrinkage in keys, a number or "gcv" or "validation"; the head's default if keys have none."""
    given = keys.get("shrinkage")
    return DEFAULT_SHRINKAGE[keys.get("head") or "gaussian"] if given is None else given


def solved_by(strategy: BaseModel, bounds: BaseModel) -> str:
    """SHA-256 of the settings that turn sums into a head: an experiment's blocks `strategy` and `bounds`.

    A site signs it with its sums, so that an operator cannot solve them by other settings and say that the
    sites agreed.
    """
    content = {"strategy": strategy.model_dump(mode="json"), "bounds": bounds.model_dump(mode="json")}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
