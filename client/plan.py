"""What the approved experiment asks of a site: which requests in which round, how often, with which settings.

A deployed site answers that and nothing else. The bounds are per task and round; what a run may repeat after
a crash, how many runs there may be, and how many evaluations in all, the policy says.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from perennial.client.ring_turn import turn_of
from perennial.config.analytic import shrinkage_of
from perennial.config.evaluation import asks_for_tables
from perennial.config.experiment import Experiment
from perennial.config.turn import USUAL_SEGMENTS
from perennial.data.registry import Registry
from perennial.foundation.errors import PolicyRefusal
from perennial.protocol.measurements import (
    CLASS_COVERAGE,
    CLASSIFICATION_LOSS,
    HELD_OUT_ACCURACY,
    LABEL_COUNTS,
    TRAIN_ACCURACY,
    asked,
)
from perennial.protocol.messages import (
    ClassCountsRequest,
    CompareHeadsRequest,
    DigestRequest,
    EvaluateRequest,
    FinishTaskRequest,
    PersonalModelRequest,
    SparsityRequest,
    StatisticsRequest,
    TrainRequest,
)
from perennial.protocol.stamp import Stamp

SETTINGS = {
    "serial_ring": ("turn",),
    "glfc": ("prototypes",),
    "target": ("rehearsal",),
    "scaffold": ("correction",),
    "feddyn": ("correction",),
    "adabest": ("correction",),
    "class_weighted_head": ("tell",),
    "feddisco": ("tell",),
    "multi_factor": ("tell",),
    "contribution": ("tell",),
}
"""By strategy: the keys of TrainRequest.settings that it sends."""
TOLD = {
    "class_weighted_head": (LABEL_COUNTS,),
    "feddisco": (LABEL_COUNTS,),
    "multi_factor": (CLASS_COVERAGE, HELD_OUT_ACCURACY, TRAIN_ACCURACY, CLASSIFICATION_LOSS),
    "contribution": (LABEL_COUNTS,),
}
"""By strategy: the measurements that it may ask for."""
CLUSTERED = ("clustered_personalisation", "fedper", "pfa")
"""Strategies with layers of the sites' own."""
KINDS: dict[type[Stamp], str] = {
    TrainRequest: "train",
    FinishTaskRequest: "finish_task",
    EvaluateRequest: "evaluate",
    PersonalModelRequest: "personal_model",
    DigestRequest: "digest",
    SparsityRequest: "sparsity",
    StatisticsRequest: "statistics",
    ClassCountsRequest: "class_counts",
    CompareHeadsRequest: "compare_heads",
}


def nested_strategies(experiment: Experiment) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, own keys) of the experiment's strategy and of each that it wraps, from the outside in."""
    name, keys = experiment.strategy.name, experiment.strategy.parameters
    while True:
        base = keys.get("base")
        yield name, keys
        if base is None:
            return
        section = {"name": base} if isinstance(base, str) else dict(base)
        name, keys = section.pop("name"), section


@dataclass(frozen=True)
class Plan:
    """The requests of one approved experiment."""

    experiment: Experiment
    registry: Registry

    @cached_property
    def strategies(self) -> dict[str, Mapping[str, Any]]:
        """Every strategy by name, with its keys."""
        return dict(nested_strategies(self.experiment))

    @cached_property
    def last_rounds(self) -> list[int]:
        """Number of each task's last round."""
        rounds = self.registry.schedule.rounds
        return list(accumulate(self.experiment.lead_rounds(i) + r for i, r in enumerate(rounds, start=1)))

    @property
    def rounds(self) -> int:
        """Of the whole run."""
        return self.last_rounds[-1]

    @property
    def segments(self) -> int:
        """Requests to train that a site gets in one round."""
        ring = self.strategies.get("serial_ring")
        return 1 if ring is None else int(ring.get("segments", USUAL_SEGMENTS))

    @property
    def measurements(self) -> tuple[str, ...]:
        """The measurements that the experiment may ask for."""
        return tuple(name for strategy in self.strategies for name in TOLD.get(strategy, ()))

    @property
    def judged(self) -> int:
        """Evaluations in one round by which sites value a ring's models, where the server has no samples."""
        experiment = self.experiment
        without = experiment.data.only_at_sites or not experiment.evaluation.central
        if "contribution" not in self.strategies or not without:
            return 0
        sites = experiment.data.sites or experiment.rounds.wait_for or 1
        return self.segments * sites + 1

    def most(self, kind: str, number: int) -> int:
        """Requests of a kind that a site gets in one round, or of sparsity and digest in its task."""
        last = number in self.last_rounds
        experiment = self.experiment
        heads = "own_heads" in self.strategies
        own = heads or any(name in self.strategies for name in CLUSTERED)
        match kind:
            case "train":
                return self.segments if experiment.strategy.trains else 0
            case "finish_task":
                return int(last and experiment.needs_previous)
            case "evaluate":
                validated = experiment.stopping is not None
                return int(last and experiment.evaluation.federated) + self.judged + validated
            case "personal_model":
                return int(own and (last or (experiment.evaluation.every == "round" and not heads)))
            case "statistics" | "class_counts":
                # of this task, and of earlier ones that the site was away for
                tasks = 1 + sum(number > last for last in self.last_rounds)
                needed = kind == "statistics" or self._head == "balanced_ridge"
                return tasks if "analytic" in self.strategies and needed else 0
            case "compare_heads":
                keys = self.strategies.get("analytic")
                return int(keys is not None and shrinkage_of(keys) == "validation") + int(heads and last)
            case "sparsity":
                return int(bool({"clustered_personalisation", "pfa"} & self.strategies.keys()))
            case _:
                return int(experiment.digests is not None)

    def evaluations(self) -> int:
        """Answers with counts on held-out samples in the whole run."""
        counted = ["evaluate", "compare_heads"]
        if self.experiment.evaluation.federated:
            counted.append("personal_model")
        return sum(self.most(kind, number) for kind in counted for number in range(1, self.rounds + 1))

    def check(self, request: Stamp) -> str:
        """The kind of a request that this experiment makes. Raises PolicyRefusal naming what it does not."""
        kind, schedule = KINDS[type(request)], self.registry.schedule
        if not 1 <= request.round <= self.rounds:
            raise PolicyRefusal(
                f"round: found {request.round}, allowed 1 to {self.rounds}, the rounds of the approved "
                "experiment"
            )
        task = next(i for i, last in enumerate(self.last_rounds, start=1) if request.round <= last)
        if (request.task, request.num_classes) != (task, schedule.num_classes(task)):
            raise PolicyRefusal(
                f"task, num_classes: found {request.task}, {request.num_classes}; in round {request.round} "
                f"of the approved experiment they are {task}, {schedule.num_classes(task)}"
            )
        if self.most(kind, request.round) == 0:
            raise PolicyRefusal(
                f"{kind}: the approved experiment does not ask for it in round {request.round}"
            )
        if isinstance(request, TrainRequest):
            self._check_settings(request)
        if isinstance(request, EvaluateRequest):
            self._check_evaluation(request)
        if isinstance(request, StatisticsRequest) and (request.weights is None) != (
            self._head != "balanced_ridge"
        ):
            raise PolicyRefusal("weights: the approved experiment has them with head balanced_ridge alone")
        return kind

    def _check_evaluation(self, request: EvaluateRequest) -> None:
        if request.validation and self.experiment.stopping is None:
            raise PolicyRefusal("validation: the approved experiment has no stopping rule")
        if not request.tables:
            return
        if not asks_for_tables(self.experiment) or request.round not in self.last_rounds:
            raise PolicyRefusal(
                "tables: the approved experiment asks for them at the end of a task, where it has "
                "evaluation.measures"
            )

    @property
    def _head(self) -> str:
        return str(self.strategies.get("analytic", {}).get("head", "gaussian"))

    def _check_settings(self, request: TrainRequest) -> None:
        allowed = {key for name in self.strategies for key in SETTINGS.get(name, ())}
        names = ", ".join(self.strategies)
        for key in _keys(request.settings):
            if key not in allowed:
                raise PolicyRefusal(
                    f"settings.{key}: the approved experiment's strategy ({names}) does not use it"
                )
        for name in asked(request.settings):
            if name not in self.measurements:
                raise PolicyRefusal(
                    f"settings.tell: {name!r}: the approved experiment's strategy ({names}) does not ask "
                    "for it"
                )
        self._check_correction(request)
        self._check_turn(request)
        if request.personal and not any(name in self.strategies for name in CLUSTERED):
            raise PolicyRefusal(
                f"personal: the approved experiment's strategy ({names}) has no layers of a site's own"
            )
        if request.clip_norm is not None and self.experiment.privacy.adaptive_clipping is None:
            raise PolicyRefusal("clip_norm: the approved experiment has no privacy.adaptive_clipping")

    def _check_correction(self, request: TrainRequest) -> None:
        order = json.loads(request.settings).get("correction")
        found = order.get("name") if isinstance(order, dict) else None
        if found is not None and found not in self.strategies:
            raise PolicyRefusal(f"settings.correction: {found!r:.40} is not the approved experiment's")

    def _check_turn(self, request: TrainRequest) -> None:
        turn, keys = turn_of(request), self.strategies.get("serial_ring", {})
        if turn is None:
            return
        approved = {
            "segments": self.segments,
            "sizes": keys.get("sizes", "variable"),
            "least": keys.get("least_segment"),
            "stratify": keys.get("stratify", False),
        }
        for key, value in approved.items():
            if getattr(turn, key) != value:
                raise PolicyRefusal(
                    f"settings.turn.{key}: found {getattr(turn, key)!r:.40}, in the approved experiment "
                    f"{value!r}"
                )
        clip, noise = keys.get("feature_clip"), keys.get("feature_noise")
        if (turn.features is None) != (clip is None) or (
            turn.features is not None and (turn.features.clip, turn.features.std) != (clip, noise)
        ):
            raise PolicyRefusal("settings.turn.features: not those of the approved experiment")


def _keys(settings: str) -> list[str]:
    try:
        content = json.loads(settings)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise PolicyRefusal(f"settings: found {settings!r:.60}, allowed a JSON object")
    return list(content)
