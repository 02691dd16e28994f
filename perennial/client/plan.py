"""What the approved experiment asks of a site: which requests in which round, how often, with which settings.

A deployed site answers that and nothing else. The bounds are per task and round; what a run may repeat after
a crash, how many runs there may be, and how many evaluations in all, the policy says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

from perennial.config.evaluation import asks_for_tables, fits_temperature
from perennial.config.experiment import Experiment
from perennial.config.strategies import Asks, find_asks, list_nested
from perennial.data.schedule import Registry
from perennial.foundation.errors import PolicyRefusal
from perennial.foundation.plain import PlainObject, read_object
from perennial.learning.site_method import SiteMethod, SiteMethods
from perennial.protocol.measurements import HELD_OUT_ACCURACY, parse_measurements
from perennial.protocol.messages import EvaluateRequest, TrainRequest
from perennial.protocol.stamp import Stamp

MASKED = ("train", "finish_task", "evaluate", "statistics")
"""Kinds whose answers go into masked sums where the experiment has `secure`."""
OF_SUMS = ("introduce", "share", "vote", "open")
"""Kinds that make and open a masked sum and carry no values."""
FREE = {
    "attempt": "a counter of masked sums, of which none is taken twice",
    "of_task": "a task that has begun: answer_statistics, answer_class_counts",
    "weights": "with head balanced_ridge, and never under a protection: SumsSite.check",
    "temperature": "with exact tables alone: _check_evaluation",
}
"""The numbers in which a request may differ from the approved experiment, and what bounds each.

Noise, clip norm, work, layers and channels are in no request: the site takes them from the experiment."""


@dataclass(frozen=True)
class Plan:
    """The requests of one approved experiment."""

    experiment: Experiment
    registry: Registry

    @cached_property
    def strategies(self) -> dict[str, Mapping[str, Any]]:
        """Keys of the experiment's strategy and of each that it wraps, by the strategy's name."""
        return dict(list_nested(self.experiment.strategy.name, self.experiment.strategy.parameters))

    @cached_property
    def asks(self) -> dict[str, Asks]:
        """What each of these strategies asks of a site, by its name."""
        return {name: find_asks(name, keys) for name, keys in self.strategies.items()}

    @cached_property
    def halves(self) -> Sequence[SiteMethod]:
        """The site halves of the experiment's methods that may add requests to the usual ones."""
        return SiteMethods.planned(self.experiment).methods

    @property
    def last_rounds(self) -> list[int]:
        """Number of each task's last round."""
        return self._last_rounds

    @cached_property
    def _last_rounds(self) -> list[int]:
        rounds = self.registry.schedule.rounds
        return list(accumulate(self.experiment.lead_rounds(i) + r for i, r in enumerate(rounds, start=1)))

    @property
    def rounds(self) -> int:
        """Number of rounds in the whole run."""
        return self.last_rounds[-1]

    @property
    def measurements(self) -> tuple[str, ...]:
        """The measurements that the experiment may ask for."""
        return tuple(name for asks in self.asks.values() for name in asks.measurements)

    def most(self, kind: str, number: int) -> int:
        """Most requests of a kind that a site gets in round `number`; sparsity, digest: in its task."""
        if kind in OF_SUMS:
            if self.experiment.secure is None:
                return 0
            # each sum takes masks that are made afresh, or were made ahead beside the opening before
            return 1 if kind == "introduce" else 2 * sum(self.most(of, number) for of in MASKED)
        extra = sum(half.extra_requests(kind, number, self) for half in self.halves)
        return self._count_usual(kind, number) + extra

    def _count_usual(self, kind: str, number: int) -> int:
        experiment, last = self.experiment, number in self.last_rounds
        match kind:
            case "train":
                return int(experiment.strategy.trains)
            case "finish_task":
                return int(last and experiment.needs_previous)
            case "evaluate":
                return int(last and experiment.evaluation.federated)
            case "temperature":
                return int(last and fits_temperature(experiment))
            case _:
                return 0

    def count_evaluations(self) -> int:
        """Requests in the whole run that a site answers with counts of held-out samples."""
        return self._count_evaluations() + sum(half.extra_questions(self)[0] for half in self.halves)

    def count_questions(self) -> int:
        """Models in the whole run that a site is asked to judge on its held-out samples."""
        beside = sum(half.extra_questions(self)[1] for half in self.halves)
        if HELD_OUT_ACCURACY in self.measurements:
            beside += sum(self.most("train", number) for number in range(1, self.rounds + 1))
        return self._count_evaluations() + beside

    def _count_evaluations(self) -> int:
        return sum(self.most("evaluate", number) for number in range(1, self.rounds + 1))

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
        settled = {"round": request.round, "task": task, "num_classes": schedule.num_classes(task)}
        for field in fields(request):
            name, value = field.name, getattr(request, field.name)
            if name not in FREE and is_number(value) and value != settled.get(name):
                raise PolicyRefusal(
                    f"{name}: found {value}, in round {request.round} of the approved experiment it is "
                    f"{settled.get(name)}"
                )
        if self.most(kind, request.round) == 0:
            raise PolicyRefusal(
                f"{kind}: the approved experiment does not ask for it in round {request.round}"
            )
        if isinstance(request, TrainRequest):
            self._check_settings(request)
        if isinstance(request, EvaluateRequest):
            self._check_evaluation(request)
        for half in self.halves:
            half.check(request, self)
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
        if request.validation and not fits_temperature(self.experiment):
            raise PolicyRefusal("validation: the approved experiment has no validation samples")

    def _check_settings(self, request: TrainRequest) -> None:
        allowed = {key for asks in self.asks.values() for key in asks.setting_keys}
        if self.measurements:
            allowed.add("tell")
        names, content = ", ".join(self.strategies), _parse_settings(request.settings)
        for key in content:
            if key not in allowed:
                raise PolicyRefusal(
                    f"settings.{key}: the approved experiment's strategy ({names}) does not use it"
                )
        for name in parse_measurements(request.settings):
            if name not in self.measurements:
                raise PolicyRefusal(
                    f"settings.tell: {name!r}: the approved experiment's strategy ({names}) does not ask "
                    "for it"
                )
        for asks in self.asks.values():
            asks.check_settings(content)


def is_number(value: Any) -> bool:
    """Whether a field's value is a number, or a list with one."""
    if isinstance(value, list):
        return any(is_number(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse_settings(settings: str) -> PlainObject:
    try:
        return read_object(settings)
    except ValueError:
        raise PolicyRefusal(f"settings: found {settings!r:.60}, allowed a JSON object") from None
