"""What a program hears of a run while it goes: its own callbacks, and the bar that run() shows."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perennial.engine.grid import Listener


class Callback:
    """Told of a run as it goes on; each method does nothing by default, and an error in one stops the run.

    Each takes an entry of the journal (events.jsonl); a resumed run tells of its further rounds.
    """

    def on_round(self, entry: Mapping[str, Any]) -> None:
        """Hear of a round: `round`, `task`, `participants`, `train_loss`, `accuracy`, bytes, seconds."""

    def on_task(self, entry: Mapping[str, Any]) -> None:
        """Hear of a finished task: `task`, `average_accuracy`, and `accuracy`, a list by task so far."""


@contextmanager
def notify_callbacks(callbacks: Sequence[Callback], name: str) -> Iterator[Listener]:
    """Context manager: a listener of the journal that tells the callbacks, and shows how far a run is.

    A terminal gets a bar, a notebook a line that changes, anything else nothing.
    """
    kinds = {"round": "on_round", "task_finished": "on_task"}
    with _show_progress(name) as shown:

        def tell(entry: dict[str, Any]) -> None:
            shown(entry)
            if method := kinds.get(entry["event"]):
                for each in callbacks:
                    getattr(each, method)(entry)

        yield tell


@contextmanager
def _show_progress(name: str) -> Iterator[Listener]:
    notebook = "ipykernel" in sys.modules
    if not notebook and not sys.stderr.isatty():
        yield lambda entry: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=notebook)
    line, planned = bar.add_task(name, total=None), 0

    def show(entry: dict[str, Any]) -> None:
        nonlocal planned
        if entry["event"] == "task_started":
            planned = sum(entry.get("rounds", ()))
        elif entry["event"] == "round":
            text, number = f"{name}: task {entry['task']}, round", entry["round"]
            bar.update(line, description=text, completed=number, total=planned or None)
            if notebook:
                print(f"\r{text} {number}" + (f" of {planned}" if planned else ""), end="", flush=True)

    with bar:
        yield show
    if notebook:
        print()
