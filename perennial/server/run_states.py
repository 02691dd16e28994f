"""A run as a state machine: its states, what leads from one to the next, and what a resume does in each.

| state | on the disk | a resume |
| --- | --- | --- |
| NEW | folder, experiment.yaml, perhaps a journal; no checkpoint | starts over: no site was asked anything |
| BETWEEN | checkpoint with the plan; the model of the task before | begins the next task |
| TRAINING | checkpoint of the latest aggregated round | asks for the next round, or ends the task |
| LEARNT | the last task's model; no summary, or half of one | writes the results |
| FINISHED | everything | writes the results again; with more classes, or sums to ask again: continues |

| event | from | to |
| --- | --- | --- |
| planned | NEW | BETWEEN |
| aggregated, passed_over | BETWEEN, TRAINING | TRAINING |
| task_learnt | BETWEEN, TRAINING | BETWEEN; after the last task LEARNT |
| results_written | LEARNT, FINISHED | FINISHED |
| continued | FINISHED | BETWEEN |
| begun_again | FINISHED | BETWEEN |

Nothing else changes a state. A round that too few sites answered, a refusal, an absence, a pause, a stop and
a kill are no events: the disk says what it said before, and no planned round is used up.

Each event ends in one checkpoint, which is replaced in one atomic step, so a run is in one state at any
moment. The plan (class order, tasks, rounds) is in the checkpoint from the first event on. It is read from
there, and not from data, until the run is finished; only `continued` replaces it, by one that it begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from perennial.data.schedule import Registry, TaskSchedule
from perennial.foundation.errors import StateError
from perennial.foundation.plain import PlainObject


class State(StrEnum):
    """The states that a run's checkpoint can name."""

    NEW = "new"
    BETWEEN = "between tasks"
    TRAINING = "training"
    LEARNT = "learnt"
    FINISHED = "finished"


LEADS: Mapping[str, frozenset[State]] = {
    "planned": frozenset({State.NEW}),
    "aggregated": frozenset({State.BETWEEN, State.TRAINING}),
    "passed_over": frozenset({State.BETWEEN, State.TRAINING}),
    "task_learnt": frozenset({State.BETWEEN, State.TRAINING}),
    "results_written": frozenset({State.LEARNT, State.FINISHED}),
    "continued": frozenset({State.FINISHED}),
    "begun_again": frozenset({State.FINISHED}),
}
"""The states in which each event can happen."""


@dataclass
class Progress:
    """The position of a run. round: rounds done since the start; round_in_task: rounds done of this task."""

    run: str
    split_key: str = ""
    """By which sites divide their own data; hexadecimal, drawn once."""
    plan: PlainObject = field(default_factory=dict)
    """Class order, boundaries of tasks and rounds of each, from the start to the end; {} before `planned`."""
    task: int = 1
    round: int = 0
    round_in_task: int = 0
    previous: str = ""
    """SHA-256 of the complete model at the end of the task before."""
    holders: list[str] = field(default_factory=list)
    """Sites known to hold that model."""
    inputs: PlainObject = field(default_factory=dict)
    """How data reach the model: shape, scale, constants and columns, as the run found them."""
    history: PlainObject = field(default_factory=dict)
    secret: str = ""
    """Hexadecimal, drawn where sites hold their own data; never sent. Empty in simulation."""
    passed: int = 0
    """Rounds of the schedule that were left out, because too many sites are declared absent."""
    bounds: PlainObject = field(default_factory=dict)
    """Medians of the latest rounds, from which bounds on the next one's updates follow."""
    cohort: int = 1
    """Sites that train in one pass."""
    journal_position: int = 0
    seconds: float = 0.0
    finished: bool = False

    @property
    def state(self) -> State:
        if not self.plan:
            return State.NEW
        if self.finished:
            return State.FINISHED
        if self.task > len(self.plan["rounds"]):
            return State.LEARNT
        return State.TRAINING if self.round_in_task else State.BETWEEN

    @property
    def registry(self) -> Registry:
        """The class registry that the plan was made from."""
        plan = self.plan
        schedule = TaskSchedule(tuple(plan["boundaries"]), tuple(plan["rounds"]))
        return Registry(tuple(plan["classes"]), schedule)

    # the events

    def planned(self, registry: Registry) -> None:
        """Fix the class order, the tasks and their rounds as the plan."""
        self._require("planned")
        self.plan = _as_plan(registry)

    def aggregated(self) -> None:
        """Count a round whose aggregate is now the model."""
        self._require("aggregated")
        self.round, self.round_in_task = self.round + 1, self.round_in_task + 1

    def passed_over(self) -> None:
        """Leave out a round in which the experiment declares too many sites absent; it keeps its number."""
        self._require("passed_over")
        self.round, self.round_in_task = self.round + 1, self.round_in_task + 1
        self.passed += 1

    def task_learnt(self, model: str, holders: list[str]) -> None:
        """Go on to the next task. model: SHA-256 of the previous model there. holders: sites that keep it."""
        self._require("task_learnt")
        self.previous, self.holders = model, holders
        self.task, self.round_in_task = self.task + 1, 0

    def results_written(self) -> None:
        """Mark the run as finished, with model, summary and report written.

        It writes nothing itself; the caller saves the checkpoint. Raises StateError before all is learnt.
        """
        self._require("results_written")
        self.finished = True

    def continued(self, registry: Registry) -> None:
        """Extend the plan by more tasks. Raises StateError unless the new plan begins with the old one."""
        self._require("continued")
        new = _as_plan(registry)
        for name, old in self.plan.items():
            if new[name][: len(old)] != old:
                raise StateError(f"tasks: {name} of a run that continues begin with {old}, found {new[name]}")
        self.plan, self.finished = new, False

    def begun_again(self) -> None:
        """Return to the first task, for a second run through the same plan; the strategy keeps its state."""
        self._require("begun_again")
        self.task, self.round, self.round_in_task, self.passed, self.finished = 1, 0, 0, 0, False
        self.previous, self.holders, self.history = "", [], {}

    def _require(self, event: str) -> None:
        if self.state not in LEADS[event]:
            allowed = ", ".join(sorted(LEADS[event]))
            raise StateError(f"{event}: the run is {self.state}; allowed: {allowed}")


def _as_plan(registry: Registry) -> dict[str, Any]:
    """JSON-able, as a checkpoint gives it back."""
    schedule = registry.schedule
    return {
        "classes": list(registry.classes),
        "boundaries": list(schedule.boundaries),
        "rounds": list(schedule.rounds),
    }
