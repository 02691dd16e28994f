"""The numbers in a journal event that a dashboard draws, under one name each everywhere."""

from collections.abc import Iterator
from typing import Any, NamedTuple

OF_A_ROUND = ("train_loss", "accuracy", "seconds", "bytes_up", "bytes_down")
OF_A_TASK = ("average_accuracy", "balanced_accuracy")


class Figure(NamedTuple):
    """name: with a folder before it. step: the round, or the task for figures of a task."""

    name: str
    value: float
    step: int


def figures(event: dict[str, Any]) -> Iterator[Figure]:
    """The numbers of an event; what was not measured is left out."""
    match event["event"]:
        case "round":
            step = event["round"]
            reported = {name: event.get(name) for name in OF_A_ROUND}
            reported |= {"sites": len(event["participants"]), "dropped": len(event["dropped"])}
            yield from _known("round", reported, step)
        case "validated":
            yield from _known("round", {"validation": event["value"]}, event["round"])
        case "task_finished":
            step = event["task"]
            reported = {name: event.get(name) for name in OF_A_TASK}
            reported |= {f"accuracy of task {i}": value for i, value in enumerate(event["accuracy"], start=1)}
            yield from _known("task", reported, step)


def _known(folder: str, reported: dict[str, Any], step: int) -> Iterator[Figure]:
    for name, value in reported.items():
        if value is not None:
            yield Figure(f"{folder}/{name}", float(value), step)
