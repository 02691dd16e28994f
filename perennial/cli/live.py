"""The live display of a run: a table that fills as tasks and rounds pass, or plain lines."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from perennial.config.experiment import Experiment
from perennial.config.presets import describe_learner
from perennial.server.control import PAUSES, pause_in_words

LONGEST_LINE = 10_000
"""Characters of a line of a log."""


class LiveDisplay:
    """Shows one row for each task, from the events of the journal."""

    def __init__(self, experiment: Experiment) -> None:
        # a log that is piped into a file has no width: its lines are whole
        self._console = Console() if sys.stdout.isatty() else Console(width=LONGEST_LINE)
        self._name = experiment.name
        self._learner = describe_learner(experiment) if experiment.strategy.trains else ""
        self._rows: list[dict[str, str]] = []
        self._rounds: list[int] = []
        """Of each task, once the first has started."""
        self._done = 0
        self._first = 0
        self._clock = time.monotonic()
        self._live = Live(self._build_table(), console=self._console, refresh_per_second=8, transient=True)

    def show_start(self, folder: Path) -> None:
        """Print the run's folder and the learner, as a difference from its preset."""
        self._console.print(f"{self._name}: {folder}", highlight=False, markup=False, soft_wrap=True)
        if self._learner:
            self._console.print(self._learner, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._build_table())

    def show_event(self, event: dict[str, Any]) -> None:
        """Show one event of the journal: a task, a round, a note or a pause. Other events change nothing."""
        match event["event"]:
            case "task_started":
                self._rounds = event.get("rounds", [])
                self._rows.append(
                    {"classes": ", ".join(event["classes"]), "round": "", "loss": "", "seen": ""}
                )
            case "round":
                self._round(event)
            case "task_finished":
                average = event["average_accuracy"]
                balanced = event.get("balanced_accuracy") if event.get("unbalanced") else None
                self._row["seen"] = (
                    _format_percent(average) if balanced is None else f"{_format_percent(balanced)} balanced"
                )
                if not self._console.is_terminal:
                    result = "accuracy not measured"
                    if average is not None:
                        result = f"{_format_percent(average)} on all classes seen so far"
                    if balanced is not None:
                        result += f", {_format_percent(balanced)} balanced accuracy"
                    self._console.print(f"task {event['task']} learnt: {result}", highlight=False)
            case "note":
                self._console.print(f"note: {event['text']}", style="yellow", markup=False)
            case kind if kind in PAUSES:
                self._console.print(pause_in_words(event), style="yellow", markup=False)
        if self._console.is_terminal:
            self._live.update(self._build_table())

    @property
    def _row(self) -> dict[str, str]:
        if not self._rows:
            # resumed in the middle of a task, whose start was shown before the stop
            self._rows.append({"classes": "(resumed)", "round": "", "loss": "", "seen": ""})
        return self._rows[-1]

    def _format_progress(self, number: int) -> str:
        """Round n of N, counted over all tasks."""
        self._done = number
        self._first = self._first or number
        return f"{number} of {sum(self._rounds)}" if self._rounds else str(number)

    def _estimate_remaining(self) -> str:
        """The time that remains if later rounds take as long as those so far; '' after the last round."""
        left = sum(self._rounds) - self._done
        if left <= 0:
            return ""
        seconds = (time.monotonic() - self._clock) / (self._done - self._first + 1) * left
        about = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f", about {about} left"

    def _round(self, event: dict[str, Any]) -> None:
        loss = "" if event["train_loss"] is None else f"{event['train_loss']:.3f}"
        self._row.update(round=self._format_progress(event["round"]), loss=loss)
        if event["accuracy"] is not None:
            self._row["seen"] = _format_percent(event["accuracy"])
        for kind in ("dropped", "refused"):
            for entry in event[kind]:
                self._console.print(
                    f"{kind}: {entry['site']}: {entry['reason']}", style="yellow", markup=False
                )
        if event["skipped"]:
            self._console.print(f"round {event['round']} skipped: the model is as it was", style="red")
        if not self._console.is_terminal:
            seen = f", accuracy {self._row['seen']}" if event["accuracy"] is not None else ""
            sites = len(event["participants"])
            self._console.print(
                f"task {event['task']} round {self._row['round']}: loss {loss or '-'}{seen}, {sites} sites, "
                f"{event['seconds']:.2f} s{self._estimate_remaining()}",
                highlight=False,
            )

    def _build_table(self) -> Table:
        table = Table(
            title=f"{self._name}{self._estimate_remaining()}", title_justify="left", header_style="bold"
        )
        for column in ("task", "classes", "round", "loss", "accuracy so far"):
            table.add_column(column, justify="left" if column == "classes" else "right")
        for number, row in enumerate(self._rows, start=1):
            table.add_row(str(number), Text(row["classes"]), row["round"], row["loss"], row["seen"])
        return table

    def show_result(self, summary: dict[str, Any], folder: Path) -> None:
        """Print accuracy matrix, headline figures and report path. summary: content of summary.json."""
        matrix = summary["accuracy_matrix"]
        table = Table(
            title="accuracy matrix: row = after task, column = on the classes of task", title_justify="left"
        )
        table.add_column("after", justify="right")
        for task in range(1, len(matrix) + 1):
            table.add_column(str(task), justify="right")
        for task, row in enumerate(matrix, start=1):
            table.add_row(str(task), *[_format_percent(value) for value in row])
        self._console.print(table)
        if any(value is None for row in matrix for value in row):
            self._console.print(
                f"{_format_percent(None)} not measured: the server holds no test samples of these "
                "classes, and no site told what it counted"
            )
        forgetting = summary["forgetting"]
        balanced = summary["balanced_accuracy"][-1] if summary["unbalanced"] else None
        self._console.print(
            ("" if balanced is None else f"final balanced accuracy {_format_percent(balanced)}, ")
            + f"final accuracy {_format_percent(summary['final_accuracy'])}, "
            f"average incremental accuracy {_format_percent(summary['average_incremental_accuracy'])}"
            + ("" if forgetting is None else f", forgetting {100 * forgetting:.1f} points"),
            highlight=False,
        )
        epsilon = summary["epsilon"]
        if epsilon is not None and epsilon["value"] is None:
            self._console.print("epsilon infinite: no noise was added")
        elif epsilon is not None:
            self._console.print(
                f"epsilon {epsilon['value']:.3g} for each {epsilon['unit']}, delta {epsilon['delta']:g} "
                f"({epsilon['accountant']})",
                highlight=False,
            )
        self._console.print(
            f"report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True
        )


def _format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
