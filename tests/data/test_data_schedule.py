"""Class order, tasks, and what a continued run keeps of both."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.data.schedule import TaskSchedule, build_registry, build_schedule, order_classes
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError

NAMES = tuple(f"class {letter}" for letter in "abcdefghijkl")
orders = st.sampled_from(["seeded", "natural", "1993"])


@settings(deadline=None)
@given(order=orders, count=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_an_order_is_a_permutation_that_its_seed_decides(order: str, count: int, seed: int) -> None:
    found = order_classes(order, NAMES[:count], seed)
    assert sorted(found) == list(range(count))
    assert found == order_classes(order, NAMES[:count], seed)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (("b", "a"), "missing c"),
        (("b", "a", "c", "d"), "unknown class 'd'"),
        (("b", "a", "a"), "listed twice"),
    ],
)
def test_an_explicit_order_must_be_a_permutation(order: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        order_classes(order, ("a", "b", "c"), 0)


@settings(deadline=None)
@given(classes=st.integers(1, 60), data=st.data())
def test_tasks_partition_the_classes_evenly(classes: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, classes))
    schedule = build_schedule(TasksConfig(count=count, rounds=3), classes)
    owned = [list(schedule.list_classes(task)) for task in range(1, count + 1)]
    sizes = [len(task) for task in owned]
    assert [label for task in owned for label in task] == list(range(classes))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sum(schedule.rounds) == 3 * count


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (TasksConfig(increments=(3, 3), rounds=1), r"\[3, 3\] sum to 6, but there are 10 classes"),
        (TasksConfig(increments=3, rounds=1), "10 classes cannot be cut into increments of 3"),
        (TasksConfig(count=11, rounds=1), "11 tasks cannot share 10 classes"),
        (TasksConfig(count=2, rounds=(1, 2, 3)), r"needs 2 positive numbers, one a task; found \[1, 2, 3\]"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(tasks: TasksConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_schedule(tasks, 10)


@settings(deadline=None)
@given(order=orders, known=st.integers(1, 11), seed=st.integers(0, 1000), shuffled=st.permutations(NAMES))
def test_a_continued_run_keeps_its_order_and_tasks_as_a_prefix(
    order: str, known: int, seed: int, shuffled: list[str]
) -> None:
    tasks = TasksConfig.model_validate({"increments": 1, "order": order, "rounds": 2})
    earlier = build_registry(sorted(shuffled[:known]), tasks, seed)
    longer = build_registry(sorted(shuffled), tasks, seed, earlier)
    assert longer.classes[:known] == earlier.classes
    assert sorted(longer.classes) == sorted(NAMES)
    assert longer.schedule.boundaries[: known + 1] == earlier.schedule.boundaries
    assert build_registry(sorted(shuffled), tasks, seed, longer) == longer
    assert build_registry(sorted(shuffled), longer.as_tasks(), seed + 1) == longer


def test_new_classes_are_shared_by_the_tasks_that_are_new() -> None:
    earlier = TaskSchedule((0, 4, 6), (3, 3))
    longer = build_schedule(TasksConfig(count=4, rounds=5), 11, earlier)
    assert longer == TaskSchedule((0, 4, 6, 9, 11), (3, 3, 5, 5))
    assert build_schedule(TasksConfig(increments=(4, 2, 5), rounds=(3, 3, 9)), 11, earlier).rounds == (
        3,
        3,
        9,
    )


@pytest.mark.parametrize(
    ("tasks", "classes", "words"),
    [
        (TasksConfig(count=2, rounds=3), 8, "2 tasks, of which 2 are done, and 2 new classes cannot share 2"),
        (TasksConfig(count=3, rounds=3), 5, "5 classes, but the earlier tasks hold 6"),
        (
            TasksConfig(increments=(2, 4, 2), rounds=3),
            8,
            r"must start with those of the earlier tasks, \[4, 2\]",
        ),
        (TasksConfig(count=3, rounds=(3, 4, 3)), 8, r"must start with the earlier tasks' \[3, 3\]"),
    ],
)
def test_a_continuation_that_contradicts_the_past_is_refused(
    tasks: TasksConfig, classes: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build_schedule(tasks, classes, TaskSchedule((0, 4, 6), (3, 3)))
