"""The class registry: class names in their order, and the tasks that introduce them.

It needs no data, so a server without any can build it; it is all that a continued run inherits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from perennial.data.schedule import TaskSchedule, build_schedule, class_order, class_order_hash
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError


@dataclass(frozen=True)
class Registry:
    """The class names in their order, and the schedule that introduces them.

    classes: names in class order, so that a name's position is its internal label.
    """

    classes: tuple[str, ...]
    schedule: TaskSchedule

    def __post_init__(self) -> None:
        if len(set(self.classes)) != len(self.classes):
            raise ConfigError("class registry: a class name occurs twice")
        if len(self.classes) != self.schedule.boundaries[-1]:
            scheduled = self.schedule.boundaries[-1]
            raise ConfigError(f"class registry: {len(self.classes)} classes, but {scheduled} in the schedule")

    @property
    def order_hash(self) -> str:
        return class_order_hash(self.classes, range(len(self.classes)))

    def as_tasks(self) -> TasksConfig:
        """The `tasks` block that lists this registry's class order, task sizes and rounds."""
        boundaries = self.schedule.boundaries
        sizes = tuple(high - low for low, high in pairwise(boundaries))
        return TasksConfig(increments=sizes, order=self.classes, rounds=self.schedule.rounds)


def build_registry(
    names: Sequence[str], tasks: TasksConfig, seed: int, earlier: Registry | None = None
) -> Registry:
    """The registry of these classes (in raw order), after the classes and tasks of `earlier`, if it is given.

    Raises ConfigError where names, tasks and the earlier registry do not fit one another.
    """
    known = earlier.classes if earlier else ()
    order = class_order(tasks.order, names, seed, known)
    schedule = build_schedule(tasks, len(names), earlier.schedule if earlier else None)
    return Registry(tuple(names[index] for index in order), schedule)
