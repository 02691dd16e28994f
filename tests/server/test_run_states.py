"""Every state that a run can reach, by every order of events: the plan is kept, each round counts once."""

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest

from perennial.data.schedule import Registry, TaskSchedule
from perennial.foundation.errors import StateError
from perennial.server.run_states import LEADS, Progress, State

NAMES = "abcdefgh"


def registry(sizes: tuple[int, ...], rounds: tuple[int, ...]) -> Registry:
    boundaries = (0, *accumulate(sizes))
    return Registry(tuple(NAMES[: boundaries[-1]]), TaskSchedule(boundaries, rounds))


FIRST, MORE = registry((2, 1, 1), (2, 1, 2)), registry((2, 1, 1, 2), (2, 1, 2, 2))


def on_disk(progress: Progress) -> str:
    """What a checkpoint keeps of it."""
    return json.dumps(vars(progress), sort_keys=True)


def restored(disk: str) -> Progress:
    return Progress(**json.loads(disk)) if disk else Progress("run")


def planned_rounds(progress: Progress) -> int:
    return progress.plan["rounds"][progress.task - 1]


def steps(progress: Progress) -> Iterator[tuple[str, Callable[[Progress], None]]]:
    """What the curriculum does in a state (server/curriculum.py), and nothing else."""
    match progress.state:
        case State.NEW:
            yield "planned", lambda found: found.planned(FIRST)
        case State.BETWEEN | State.TRAINING:
            left = planned_rounds(progress) - progress.round_in_task
            if left:
                yield "aggregated", lambda found: found.aggregated()
                yield "absent by plan", lambda found: found.passed_over()
            else:
                yield "task_learnt", lambda found: found.task_learnt(f"model {found.task}", [])
        case State.LEARNT:
            yield "results_written", lambda found: found.results_written()
        case State.FINISHED:
            yield "results_written", lambda found: found.results_written()
            yield "begun_again", lambda found: found.begun_again()
            if len(progress.plan["rounds"]) == len(FIRST.schedule.rounds):
                yield "continued", lambda found: found.continued(MORE)


def reachable() -> dict[str, list[tuple[str, str]]]:
    """Every checkpoint, and what follows it: (event, the checkpoint after it). A kill leads back to it."""
    found: dict[str, list[tuple[str, str]]] = {}
    waiting = deque([""])
    while waiting:
        disk = waiting.popleft()
        if disk in found:
            continue
        found[disk] = []
        for event, apply in steps(restored(disk)):
            memory = restored(disk)
            apply(memory)
            after = on_disk(memory)
            found[disk].append((event, after))
            waiting.append(after)
    return found


def test_every_run_can_be_finished_and_none_skips_or_repeats_a_round() -> None:
    graph = reachable()
    assert len(graph) > 20
    for disk, following in graph.items():
        before = restored(disk)
        assert following, "no state is the end of the road"
        for event, after in following:
            now = restored(after)
            if event not in ("planned", "continued"):
                assert now.plan == before.plan, "task boundaries are fixed"
            numbers = now.plan["rounds"]
            done = sum(numbers[: now.task - 1]) + now.round_in_task
            assert now.round == done, "rounds keep the numbers of the plan, whatever was passed over"
            assert 0 <= now.passed <= now.round
            if event == "begun_again":
                assert (now.task, now.round, now.passed, now.previous, now.holders) == (1, 0, 0, "", [])
                continue
            assert now.passed - before.passed == (event == "absent by plan")
            assert now.round - before.round in (0, 1)
            assert now.task - before.task in (0, 1)
            assert now.finished is (event == "results_written")
    # backwards from what is finished: every state leads there
    leads: set[str] = {disk for disk in graph if restored(disk).state is State.FINISHED}
    while more := {d for d, then in graph.items() if d not in leads and any(a in leads for _, a in then)}:
        leads |= more
    assert leads == set(graph)
    assert {restored(disk).state for disk in graph} == set(State)


def test_what_the_page_of_states_forbids_raises_and_changes_nothing() -> None:
    calls: dict[str, Callable[[Progress], None]] = {
        "planned": lambda found: found.planned(FIRST),
        "aggregated": lambda found: found.aggregated(),
        "passed_over": lambda found: found.passed_over(),
        "task_learnt": lambda found: found.task_learnt("model", []),
        "results_written": lambda found: found.results_written(),
        "continued": lambda found: found.continued(MORE),
        "begun_again": lambda found: found.begun_again(),
    }
    assert calls.keys() == LEADS.keys()
    tried = 0
    for disk in reachable():
        for event, call in calls.items():
            progress = restored(disk)
            if progress.state in LEADS[event]:
                continue
            before = copy.deepcopy(progress)
            with pytest.raises(StateError, match=f"{event}: the run is {progress.state}"):
                call(progress)
            assert progress == before
            tried += 1
    assert tried > 100
