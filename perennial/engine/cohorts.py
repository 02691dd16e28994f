"""Divides simulated sites into cohorts, which train in one pass; the experiment alone decides which.

The messages of one round are cut into cohorts in the order in which they are pushed, and only then handed to
workers. So neither the machine nor the number of workers changes which sites train together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np
from flwr.app import Context, Message

from perennial.config.experiment import Experiment
from perennial.config.run import CohortPlan
from perennial.foundation.errors import ConfigError
from perennial.protocol.fields import read_kind

if TYPE_CHECKING:
    from perennial.models.incremental import IncrementalModel

Together = Callable[[Sequence[Message], Sequence[Context]], list[Message]]
"""Answers requests of one round for several sites, in their order."""
Asked = int | Literal["auto"]

MOST = 10_000
"""Sites that may be asked for."""
LARGEST = 16
"""Sites of a cohort that `auto` makes."""
TOGETHER = 1 << 18
"""Floats of a cohort's largest activation under `auto`: what the cache of a core holds with its gradients.
Larger layers keep a core busy by themselves, and gain nothing from more sites."""


@dataclass(frozen=True)
class Cohorts:
    """Cohorts of sites. size: most sites of one, 2 or more. answer: replies to one cohort's messages."""

    size: int
    answer: Together

    def cut(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Divide messages, in order, into cohorts of similar size; one by one unless all ask for training."""
        training = all(
            message.has_content() and read_kind(message.content) == "TrainRequest" for message in messages
        )
        if not messages or not training:
            return [[message] for message in messages]
        bounds = np.linspace(0, len(messages), ceil(len(messages) / self.size) + 1).round().astype(int)
        return [list(messages[a:b]) for a, b in pairwise(bounds.tolist())]


def plan_cohorts(experiment: Experiment, asked: Asked) -> CohortPlan:
    """The size of an experiment's cohorts, the same on every machine; 1 with a reason if it can have none.

    asked: a number of sites, or auto. Raises ConfigError for a number outside 1 to MOST.
    """
    if asked != "auto" and not 1 <= asked <= MOST:
        raise ConfigError(f"cohort: found {asked}, allowed auto, or 1 to {MOST} sites in one pass")
    if asked == 1:
        return CohortPlan(1)
    if reason := _explain_obstacle(experiment):
        return CohortPlan(1, f"cohort {asked}: {reason}, so the sites train one after the other")
    return CohortPlan(_choose_size(experiment) if asked == "auto" else asked)


def _explain_obstacle(experiment: Experiment) -> str:
    """Why sites of this experiment cannot train in one pass, in words; '' if they can."""
    from perennial.strategies.factory import build_strategy
    from perennial.strategies.serial_ring.method import SerialRing

    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    privacy = experiment.privacy
    reasons = {
        "under `secure` each site makes its part of a sum by itself": experiment.secure is not None,
        "no site trains under this strategy": not experiment.strategy.trains,
        "the sites of a ring train one after the other": strategy.find(SerialRing) is not None,
        "privacy.mode sample clips each sample by itself": privacy.mode == "sample",
        "privacy.bayesian trains on halves of each site's data": (
            privacy.mode == "client_local" and privacy.bayesian
        ),
        "only one site trains in a round": _count_round_sites(experiment) < 2,
    }
    found = next((reason for reason, applies in reasons.items() if applies), "")
    return found or _explain_unstackable(experiment)


def _explain_unstackable(experiment: Experiment) -> str:
    """Why the model has no form for several sites; '' if it has one."""
    from perennial.models.stacked import check_stacked

    model, shape = _build_model(experiment)
    try:
        check_stacked(model, shape)
    except ConfigError as error:
        return f"the model has no form for several sites ({error})"
    return ""


def _count_round_sites(experiment: Experiment) -> int:
    from perennial.config.simulation import list_simulated_sites

    sites, rounds = len(list_simulated_sites(experiment)), experiment.rounds
    return sites if rounds.fraction == 1.0 else max(rounds.quorum, round(rounds.fraction * sites))


def _choose_size(experiment: Experiment) -> int:
    """At least two cohorts in a round, so that two workers have work; 1 for layers that fill a core."""
    from perennial.models.stacked import measure_largest_activation

    largest = measure_largest_activation(*_build_model(experiment)) * experiment.learner.batch_size
    return max(1, min(LARGEST, ceil(_count_round_sites(experiment) / 2), TOGETHER // largest))


def _build_model(experiment: Experiment) -> "tuple[IncrementalModel, tuple[int, ...]]":
    """(the model, shape of one sample)."""
    from perennial.config.simulation import load_simulated_federation
    from perennial.models.factory import build_model

    data = load_simulated_federation(experiment)
    shape, classes, constants = data.input_shape, len(data.classes), (data.mean, data.std)
    model = build_model(experiment.model, shape, classes, experiment.seed, constants)
    return model, shape
