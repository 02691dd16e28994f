"""A program hears of a run while it goes, and a person sees how far it is."""

import sys
from typing import Any

import pytest

from perennial.engine.callbacks import Callback, notify_callbacks

ENTRIES: list[dict[str, Any]] = [
    {"event": "task_started", "task": 1, "rounds": [2, 2]},
    {"event": "round", "task": 1, "round": 1},
    {"event": "note", "text": "a note"},
    {"event": "round", "task": 1, "round": 2},
    {"event": "task_finished", "task": 1},
]


class Heard(Callback):
    def __init__(self) -> None:
        self.entries: list[str] = []

    def on_round(self, entry: Any) -> None:
        self.entries.append(f"round {entry['round']}")

    def on_task(self, entry: Any) -> None:
        self.entries.append(f"task {entry['task']}")


def test_callbacks_hear_of_rounds_and_tasks_alone_and_a_log_shows_no_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard, silent = Heard(), Callback()
    with notify_callbacks([heard, silent], "small") as tell:
        for entry in ENTRIES:
            tell(entry)
    assert heard.entries == ["round 1", "round 2", "task 1"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_and_a_notebook_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> tuple[str, str]:
        with notify_callbacks([], "small") as tell:
            for entry in ENTRIES:
                tell(entry)
        return capsys.readouterr()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    out, error = shown()
    assert "2/4" in error and not out
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    out, error = shown()
    assert out == "\rsmall: task 1, round 1 of 4\rsmall: task 1, round 2 of 4\n" and not error
