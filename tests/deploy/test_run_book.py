"""A submit whose answer is lost leaves no run that nobody sees or can stop."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perennial.deploy import operations
from perennial.deploy.application import Application
from perennial.deploy.federation import Federation, OperatorFolder, create_operator_folder
from perennial.deploy.operations import flower_runs, resume, stop, submit
from perennial.deploy.run_book import FlowerRun, RunBook
from perennial.deploy.superlink_status import STATUS
from perennial.foundation.errors import StateError

NAME, BUNDLE = "trial", "a" * 64


class Flower:
    """What `flwr run`, `list` and `stop` say; an answer can be lost on its way."""

    def __init__(self) -> None:
        self.runs: list[dict[str, str]] = []
        self.lost: bool | str = False
        self.down = False

    def answer(self, folder: OperatorFolder, *arguments: str) -> dict[str, Any]:
        if self.down:
            raise StateError("Connection to the SuperLink is unavailable")
        if arguments[0] == "list":
            return {"runs": self.runs}
        assert RunBook(folder.apps).names() == [NAME], "the intent is on the disk before Flower is asked"
        self.runs.append({"run-id": str(len(self.runs) + 7), "status": "running", "fab-hash": BUNDLE})
        if self.lost:
            self.down = self.lost == "for longer"
            raise StateError("Connection to the SuperLink is unavailable")
        return self.runs[-1]

    def command(self, folder: OperatorFolder, *arguments: str) -> str:
        (run,) = [run for run in self.runs if run["run-id"] == arguments[1]]
        run["status"] = "finished:stopped"
        return ""


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Flower:
    made = Flower()
    monkeypatch.setattr(operations, "flwr_json", made.answer)
    monkeypatch.setattr(operations, "flwr", made.command)
    return made


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OperatorFolder]:
    settings = Federation(name="trials", hosts=("127.0.0.1",), runtime="process")
    folder = create_operator_folder(tmp_path / "operator", settings, 2)
    staged = Application(folder.apps / NAME, folder.apps / "x.fab", BUNDLE)
    for name in ("stage", "read_application"):
        monkeypatch.setattr(operations, name, lambda *_: staged)
    yield folder


def test_a_run_whose_answer_is_lost_is_adopted_and_not_begun_twice(
    operator: OperatorFolder, flower: Flower
) -> None:
    flower.lost = True
    assert "started as Flower's run 7" in submit(operator, Path("x"), [], NAME, "cpu").said
    assert "running (Flower's run 7)" in submit(operator, Path("x"), [], NAME, "cpu").said
    assert "stopped" in stop(operator, NAME).said and len(flower.runs) == 1


def test_a_superlink_that_stays_away_is_asked_once_it_is_back(
    operator: OperatorFolder, flower: Flower
) -> None:
    flower.lost = "for longer"
    with pytest.raises(StateError, match="begins no second one"):
        submit(operator, Path("x"), [], NAME, "cpu")
    flower.down, flower.lost = False, False
    assert "running (Flower's run 7)" in submit(operator, Path("x"), [], NAME, "cpu").said
    assert "stopped" in stop(operator, NAME).said
    assert "resumed as Flower's run 8" in resume(operator, NAME, "cpu").said


def test_a_run_of_nobody_is_unknown_and_can_be_stopped(operator: OperatorFolder, flower: Flower) -> None:
    submit(operator, Path("x"), [], NAME, "cpu")
    flower.runs.append({"run-id": "99", "status": "running", "fab-hash": "b" * 64})
    book = RunBook(operator.apps)
    assert book.unknown(flower_runs(operator)) == {"99": "running"}
    assert "no folder here names it" in stop(operator, "99").said
    assert book.unknown(flower_runs(operator)) == {}


def test_two_names_of_one_app_are_told_apart_by_the_name_that_flower_keeps(operator: OperatorFolder) -> None:
    book = RunBook(operator.apps)
    for name in ("first", "second"):
        book.intend(name, BUNDLE)
    owners = book.owners(
        {"8": FlowerRun("running", BUNDLE, "second"), "9": FlowerRun("running", BUNDLE, "x")}
    )
    assert owners == {"first": [], "second": ["8"]}


def test_a_list_of_0_2_0_is_read(operator: OperatorFolder) -> None:
    book = RunBook(operator.apps)
    book.path(NAME).write_text('["7"]')
    assert book.recorded(NAME) == ["7"]
    book.path(NAME).write_text("{")
    with pytest.raises(StateError, match=r"trial\.runs\.json"):
        book.recorded(NAME)


def test_the_superlinks_own_list_is_taken_once_it_is_newer_than_the_last_command(
    operator: OperatorFolder, flower: Flower
) -> None:
    RunBook(operator.apps).intend(NAME, BUNDLE)
    path = operator.state / "runs" / STATUS

    def write(looked: float) -> None:
        facts = {"certificate_ends": 1e12, "sites": {}, "runs": {"5": ("running", BUNDLE, NAME)}}
        path.write_text(json.dumps({**facts, "looked": looked}))

    write(time.time() + 1)
    assert flower_runs(operator) == {"5": FlowerRun("running", BUNDLE, NAME)}
    operations.FRESH, fresh = 0.2, operations.FRESH
    try:
        write(time.time() - 60)
        assert flower_runs(operator) == {}, "asked of Flower, because the file is older than the command"
    finally:
        operations.FRESH = fresh


def test_the_status_is_told_without_pytorch() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys, perennial.cli.deployment_status; sys.exit('torch' in sys.modules)",
    ]
    assert subprocess.run(command, check=False).returncode == 0
