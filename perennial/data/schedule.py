"""Which classes each task introduces: the class order, and where it is cut into tasks.

Raw label: index into the source's list of class names. Internal label: position in the class order. Task t,
counted from 1, owns the internal labels boundaries[t-1] .. boundaries[t] - 1. The registry of class names and
tasks needs no data, so that a server without any can build it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError, suggest_nearest
from perennial.foundation.streams import stream


def order_classes(
    config_order: str | Sequence[str], classes: Sequence[str], seed: int, earlier: Sequence[str] = ()
) -> tuple[int, ...]:
    """The raw index of the class at each position.

    config_order: "seeded", "natural", "1993" (NumPy's legacy seed that iCaRL fixed, Rebuffi et al. 2017,
    arXiv 1611.07725), or all class names. earlier: names whose positions are already fixed; they stay the
    prefix, and the other classes are ordered among themselves by a stream of their own.
    Raises ConfigError where the classes do not contain the earlier ones, or the list is not a permutation.
    """
    gone = [name for name in earlier if name not in classes]
    if gone:
        raise ConfigError(f"data.classes: {', '.join(gone)} belonged to the earlier tasks and must stay")
    position = {name: index for index, name in enumerate(classes)}
    if not isinstance(config_order, str):
        return _resolve_order(tuple(config_order), position, earlier)
    fixed = [position[name] for name in earlier]
    fresh = np.array([index for name, index in position.items() if name not in set(earlier)], dtype=np.int64)
    if config_order == "1993":
        fresh = fresh[np.random.RandomState(1993).permutation(len(fresh))]
    elif config_order == "seeded":
        fresh = stream(seed, "class-order", len(fixed)).permutation(fresh)
    return (*fixed, *fresh.tolist())


def _resolve_order(
    names: tuple[str, ...], position: dict[str, int], earlier: Sequence[str]
) -> tuple[int, ...]:
    for name in names:
        if name not in position:
            raise ConfigError(f"tasks.order: unknown class {name!r}{suggest_nearest(name, position)}")
    if len(set(names)) != len(names):
        raise ConfigError("tasks.order: a class is listed twice; every class belongs to one task")
    absent = [name for name in position if name not in names]
    if absent:
        raise ConfigError(f"tasks.order: must list every class; missing {', '.join(absent)}")
    if names[: len(earlier)] != tuple(earlier):
        raise ConfigError(
            f"tasks.order: must start with the order of the earlier tasks: {', '.join(earlier)}"
        )
    return tuple(position[name] for name in names)


def hash_class_order(classes: Sequence[str], order: Sequence[int]) -> str:
    """sha256 (hex) of the comma-joined class names in order: a property of names, not of indices."""
    return hashlib.sha256(",".join(classes[index] for index in order).encode()).hexdigest()


@dataclass(frozen=True)
class TaskSchedule:
    """Which classes each task introduces, and how many rounds it has.

    boundaries: (0, M_1, ..., M_T), strictly increasing.
    rounds: (R_1, ..., R_T), each at least 1.
    """

    boundaries: tuple[int, ...]
    rounds: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [high - low for low, high in pairwise(self.boundaries)]
        if not sizes or self.boundaries[0] != 0 or min(sizes) < 1:
            raise ConfigError(
                f"tasks: boundaries must start at 0 and increase; found {list(self.boundaries)}"
            )
        if len(self.rounds) != len(sizes) or min(self.rounds) < 1:
            found = list(self.rounds)
            raise ConfigError(f"tasks.rounds: needs {len(sizes)} positive numbers, one a task; found {found}")

    @property
    def count(self) -> int:
        return len(self.rounds)

    def num_classes(self, task: int) -> int:
        """M_t: classes known once task t has begun."""
        return self.boundaries[self._check_task(task)]

    def list_classes(self, task: int) -> range:
        """Internal labels that task t brings."""
        return range(self.boundaries[self._check_task(task) - 1], self.boundaries[task])

    def extend(self, sizes: Sequence[int], rounds: Sequence[int]) -> "TaskSchedule":
        """The same tasks, followed by new ones of these sizes (in classes) and rounds."""
        ends = np.cumsum([self.boundaries[-1], *sizes])[1:].tolist()
        return TaskSchedule((*self.boundaries, *ends), (*self.rounds, *rounds))

    def _check_task(self, task: int) -> int:
        if not 1 <= task <= self.count:
            raise ValueError(f"task {task} is not one of 1..{self.count}")
        return task


def build_schedule(tasks: TasksConfig, num_classes: int, earlier: TaskSchedule | None = None) -> TaskSchedule:
    """The schedule of an experiment; an earlier one is followed by tasks for the classes that it lacks.

    tasks always describes the whole: a continued run counts its finished tasks too.
    Raises ConfigError where the cut does not fit the number of classes or contradicts the earlier tasks.
    """
    if earlier is not None and earlier.boundaries[-1] == num_classes:
        return earlier
    if earlier is None:
        sizes = _compute_sizes(tasks, num_classes)
        return TaskSchedule((0, *np.cumsum(sizes).tolist()), _list_rounds(tasks, len(sizes)))
    sizes = _compute_later_sizes(tasks, num_classes, earlier)
    rounds = _list_rounds(tasks, earlier.count + len(sizes))
    if not isinstance(tasks.rounds, int) and rounds[: earlier.count] != earlier.rounds:
        done = list(earlier.rounds)
        raise ConfigError(f"tasks.rounds: must start with the earlier tasks' {done}; found {list(rounds)}")
    return earlier.extend(sizes, rounds[earlier.count :])


def _compute_sizes(tasks: TasksConfig, num_classes: int) -> list[int]:
    if tasks.count is not None:
        return _divide_equally(num_classes, tasks.count, f"tasks.count: {tasks.count} tasks")
    assert tasks.increments is not None
    return _expand_increments(tasks.increments, num_classes)


def _compute_later_sizes(tasks: TasksConfig, num_classes: int, earlier: TaskSchedule) -> list[int]:
    """Sizes of the tasks after the earlier ones."""
    known, fresh = earlier.boundaries[-1], num_classes - earlier.boundaries[-1]
    if fresh < 0:
        raise ConfigError(f"data.classes: {num_classes} classes, but the earlier tasks hold {known}")
    if tasks.count is not None:
        text = f"tasks.count: {tasks.count} tasks, of which {earlier.count} are done, and {fresh} new classes"
        return _divide_equally(fresh, tasks.count - earlier.count, text)
    assert tasks.increments is not None
    if isinstance(tasks.increments, int):
        return _expand_increments(tasks.increments, fresh)
    sizes = _compute_sizes(tasks, num_classes)
    if np.cumsum([0, *sizes])[: earlier.count + 1].tolist() != list(earlier.boundaries):
        done = np.diff(earlier.boundaries).tolist()
        raise ConfigError(
            f"tasks.increments: must start with those of the earlier tasks, {done}; found {sizes}"
        )
    return sizes[earlier.count :]


def _divide_equally(classes: int, parts: int, text: str) -> list[int]:
    """Sizes that differ by at most 1, larger first; never an empty task."""
    if parts == 0 and classes == 0:
        return []
    if not 1 <= parts <= classes:
        raise ConfigError(f"{text} cannot share {classes} classes: every task needs at least one")
    whole, more = divmod(classes, parts)
    return [whole + 1] * more + [whole] * (parts - more)


def _expand_increments(increments: int | tuple[int, ...], classes: int) -> list[int]:
    if isinstance(increments, int):
        if classes % increments:
            raise ConfigError(
                f"tasks.increments: {classes} classes cannot be cut into increments of {increments}"
            )
        return [increments] * (classes // increments)
    if sum(increments) != classes:
        found = f"{list(increments)} sum to {sum(increments)}"
        raise ConfigError(f"tasks.increments: {found}, but there are {classes} classes to share")
    return list(increments)


def _list_rounds(tasks: TasksConfig, count: int) -> tuple[int, ...]:
    return (tasks.rounds,) * count if isinstance(tasks.rounds, int) else tuple(tasks.rounds)


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
        return hash_class_order(self.classes, range(len(self.classes)))

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
    order = order_classes(tasks.order, names, seed, known)
    schedule = build_schedule(tasks, len(names), earlier.schedule if earlier else None)
    return Registry(tuple(names[index] for index in order), schedule)
