"""What the approved experiment asks of a site: which requests in which round, how often, with which settings.

A deployed site answers that and nothing else. The bounds are per task and round; what a run may repeat after
a crash, how many runs there may be, and how many evaluations in all, the policy says.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from perennial.client.ring_turn import turn_of
from perennial.config.analytic import HEADS_OF_A_MAP, heads_compared, shrinkage_of
from perennial.config.asks import Asks
from perennial.config.evaluation import asks_for_tables, fits
from perennial.config.experiment import Experiment
from perennial.config.strategies import asks_of, nested
from perennial.data.schedule import Registry
from perennial.foundation.errors import PolicyRefusal
from perennial.foundation.plain import PlainObject, read_object
from perennial.protocol.measurements import asked
from perennial.protocol.messages import (
    CompareHeadsRequest,
    EvaluateRequest,
    StatisticsRequest,
    TrainRequest,
)
from perennial.protocol.stamp import Stamp

MASKED = ("train", "finish_task", "evaluate", "statistics")
"""Kinds whose answers go into masked sums where the experiment has `secure`."""
OF_SUMS = ("introduce", "share", "vote", "open")
"""Kinds that make and open a masked sum and carry no values."""


@dataclass(frozen=True)
class Plan:
    """The requests of one approved experiment."""

    experiment: Experiment
    registry: Registry

    @cached_property
    def strategies(self) -> dict[str, Mapping[str, Any]]:
        """Keys of the experiment's strategy and of each that it wraps, by the strategy's name."""
        return dict(nested(self.experiment.strategy.name, self.experiment.strategy.parameters))

    @cached_property
    def asks(self) -> dict[str, Asks]:
        """What each of these strategies asks of a site, by its name."""
        return {name: asks_of(name, keys) for name, keys in self.strategies.items()}

    def keys_of(self, which: Callable[[Asks], bool]) -> Mapping[str, Any] | None:
        """Keys of the first strategy whose Asks satisfy `which`; None if there is no such strategy."""
        return next((self.strategies[name] for name, asks in self.asks.items() if which(asks)), None)

    @cached_property
    def last_rounds(self) -> list[int]:
        """Number of each task's last round."""
        rounds = self.registry.schedule.rounds
        return list(accumulate(self.experiment.lead_rounds(i) + r for i, r in enumerate(rounds, start=1)))

    @property
    def rounds(self) -> int:
        """Number of rounds in the whole run."""
        return self.last_rounds[-1]

    @property
    def segments(self) -> int:
        """Most training requests that a site gets in one round."""
        usual = {name: asks.segments for name, asks in self.asks.items() if asks.segments is not None}
        return max((int(self.strategies[name].get("segments", n)) for name, n in usual.items()), default=1)

    @property
    def measurements(self) -> tuple[str, ...]:
        """The measurements that the experiment may ask for."""
        return tuple(name for asks in self.asks.values() for name in asks.measurements)

    @property
    def judged(self) -> int:
        """Evaluation requests in one round by which a ring values its models; 0 if the server has samples."""
        experiment = self.experiment
        without = experiment.data.only_at_sites or not experiment.evaluation.central
        if self.keys_of(lambda asks: asks.judges_models) is None or not without:
            return 0
        sites = experiment.data.sites or experiment.rounds.wait_for or 1
        return self.segments * sites + 1

    def most(self, kind: str, number: int) -> int:
        """Most requests of a kind that a site gets in round `number`; sparsity, digest: in its task."""
        last = number in self.last_rounds
        experiment = self.experiment
        sums = self.keys_of(lambda asks: asks.statistics)
        match kind:
            case "train":
                return self.segments if experiment.strategy.trains else 0
            case "finish_task":
                return int(last and experiment.needs_previous)
            case "evaluate":
                return int(last and experiment.evaluation.federated) + self.judged
            case "temperature":
                return int(last and fits(experiment))
            case "personal_model":
                own = any(asks.own_models for asks in self.asks.values())
                return int(own and (last or experiment.evaluation.every == "round"))
            case "statistics" | "class_counts":
                # of this task, and of earlier ones that the site was away for
                tasks = 1 + sum(number > last for last in self.last_rounds)
                needed = kind == "statistics" or self._head == "balanced_ridge"
                tasks += self._alternatives
                return tasks if sums is not None and needed else 0
            case "compare_heads":
                chosen = sums is not None and shrinkage_of(sums) == "validation"
                return int(chosen) + self._alternatives
            case _ if kind in OF_SUMS:
                if experiment.secure is None:
                    return 0
                # each sum takes masks that are made afresh, or were made ahead beside the opening before
                return 1 if kind == "introduce" else 2 * sum(self.most(of, number) for of in MASKED)
            case "sparsity":
                return int(any(asks.sparsity for asks in self.asks.values()))
            case "digest":
                return int(experiment.digests is not None)
            case _:
                return 0

    def evaluations(self) -> int:
        """Requests in the whole run that a site answers with counts of held-out samples."""
        return sum(self._counted("evaluate", "compare_heads"))

    def questions(self) -> int:
        """Models in the whole run that a site is asked to judge on its held-out samples.

        A comparison of heads counts once for each head.
        """
        alone = HEADS_OF_A_MAP * self._alternatives
        return sum(self._counted("evaluate")) + self._heads * self.rounds + alone

    @property
    def _alternatives(self) -> int:
        """Maps that are compared before the sums of the chosen ones are asked for."""
        return sum(len(found.of) for found in self.experiment.model.choices)

    @property
    def _heads(self) -> int:
        """Heads that sites compare in a round."""
        return heads_compared(self.keys_of(lambda asks: asks.statistics))

    def _counted(self, *kinds: str) -> Iterator[int]:
        own = ("personal_model",) if self.experiment.evaluation.federated else ()
        for number in range(1, self.rounds + 1):
            yield from (self.most(kind, number) for kind in (*kinds, *own))

    def check(self, request: Stamp) -> str:
        """Check a request and return its kind. Raises PolicyRefusal for what the experiment does not ask."""
        kind, schedule = request.message_type.rpartition(".")[2], self.registry.schedule
        if isinstance(request, EvaluateRequest) and request.statistic == "temperature":
            # of validation samples, so that it is no further question about those that are counted
            kind = "temperature"
        if not 1 <= request.round <= self.rounds:
            raise PolicyRefusal(
                f"round: found {request.round}, allowed 1 to {self.rounds}, the rounds of the approved "
                "experiment"
            )
        if kind in ("vote", "open"):
            # about an attempt that the site keeps, of whichever round of this run it was
            return kind
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
        if isinstance(request, CompareHeadsRequest):
            found, most = questions_of(request), self._heads
            if found > most:
                raise PolicyRefusal(f"heads: found {found}, the approved experiment compares {most} at most")
        if isinstance(request, StatisticsRequest) and (request.weights is None) != (
            self._head != "balanced_ridge"
        ):
            raise PolicyRefusal("weights: the approved experiment has them with head balanced_ridge alone")
        return kind

    def _check_evaluation(self, request: EvaluateRequest) -> None:
        if request.validation and not request.tables:
            raise PolicyRefusal("validation: found without tables, from which a temperature is chosen")
        if request.temperature is not None and not request.tables:
            raise PolicyRefusal("temperature: found without tables, whose probabilities it scales")
        if not request.tables:
            return
        if not asks_for_tables(self.experiment) or request.round not in self.last_rounds:
            raise PolicyRefusal(
                "tables: the approved experiment asks for them at the end of a task, where it has "
                "evaluation.measures"
            )
        if request.validation and not fits(self.experiment):
            raise PolicyRefusal("validation: the approved experiment has no validation samples")

    @property
    def _head(self) -> str:
        return str((self.keys_of(lambda asks: asks.statistics) or {}).get("head", "gaussian"))

    def _check_settings(self, request: TrainRequest) -> None:
        allowed = {key for asks in self.asks.values() for key in asks.setting_keys}
        if self.measurements:
            allowed.add("tell")
        names, content = ", ".join(self.strategies), _content(request.settings)
        for key in content:
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
        for asks in self.asks.values():
            asks.check_settings(content)
        self._check_turn(request)
        if request.personal and self.keys_of(lambda asks: asks.personal_layers) is None:
            raise PolicyRefusal(
                f"personal: the approved experiment's strategy ({names}) has no layers of a site's own"
            )
        if request.clip_norm is not None and self.experiment.privacy.adaptive_clipping is None:
            raise PolicyRefusal("clip_norm: the approved experiment has no privacy.adaptive_clipping")

    def _check_turn(self, request: TrainRequest) -> None:
        turn, keys = turn_of(request), self.keys_of(lambda asks: asks.segments is not None) or {}
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


def questions_of(request: Stamp) -> int:
    """Models whose right answers one request asks for: the heads of a comparison, 1 otherwise."""
    if not isinstance(request, CompareHeadsRequest):
        return 1
    return max(len(request.heads["bias"]) if "bias" in request.heads else 1, 1)


def _content(settings: str) -> PlainObject:
    try:
        return read_object(settings)
    except ValueError:
        raise PolicyRefusal(f"settings: found {settings!r:.60}, allowed a JSON object") from None
