"""A submit whose answer is lost leaves no run that nobody sees or can stop."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from perennial.deploy import operations
from perennial.deploy.application import Application
from perennial.deploy.control import FlowerRun, RunBook
from perennial.deploy.federation import Federation, OperatorFolder, create_operator_folder
from perennial.deploy.operations import resume, stop, submit
from perennial.foundation.errors import StateError

NAME, BUNDLE = "trial", "a" * 64


class Flower:
    """The Control API; an answer can be lost on its way."""

    def __init__(self) -> None:
        self.runs: dict[str, FlowerRun] = {}
        self.lost: bool | str = False
        self.down = False

    def list_runs(self, folder: OperatorFolder) -> dict[str, FlowerRun]:
        if self.down:
            raise StateError("the SuperLink does not answer")
        return dict(self.runs)

    def start_run(self, folder: OperatorFolder, fab: bytes, digest: str, settings: Mapping[str, str]) -> str:
        self.list_runs(folder)
        assert RunBook(folder.apps).names() == [NAME], "the intent is on the disk before Flower is asked"
        run = str(len(self.runs) + 7)
        self.runs[run] = FlowerRun("running", digest, settings["name"])
        if self.lost:
            self.down = self.lost == "for longer"
            raise StateError("the SuperLink does not answer")
        return run

    def stop_run(self, folder: OperatorFolder, run: str) -> None:
        self.runs[run] = FlowerRun("finished:stopped", self.runs[run].bundle)


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Flower:
    made = Flower()
    monkeypatch.setattr(operations, "control", made)
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
    assert "started as Flower's run 7" in submit(operator, Path("x"), [], NAME, "cpu")
    assert "running (Flower's run 7)" in submit(operator, Path("x"), [], NAME, "cpu")
    assert "stopped" in stop(operator, NAME) and len(flower.runs) == 1


def test_a_superlink_that_stays_away_is_asked_once_it_is_back(
    operator: OperatorFolder, flower: Flower
) -> None:
    flower.lost = "for longer"
    with pytest.raises(StateError, match="begins no second one"):
        submit(operator, Path("x"), [], NAME, "cpu")
    flower.down, flower.lost = False, False
    assert "running (Flower's run 7)" in submit(operator, Path("x"), [], NAME, "cpu")
    assert "stopped" in stop(operator, NAME)
    assert "resumed as Flower's run 8" in resume(operator, NAME, "cpu")


def test_a_run_of_nobody_is_unknown_and_can_be_stopped(operator: OperatorFolder, flower: Flower) -> None:
    submit(operator, Path("x"), [], NAME, "cpu")
    flower.runs["99"] = FlowerRun("running", "b" * 64)
    book = RunBook(operator.apps)
    assert book.find_unknown(flower.runs) == {"99": "running"}
    assert "no folder here names it" in stop(operator, "99")
    assert book.find_unknown(flower.runs) == {}


def test_two_names_of_one_app_are_told_apart_by_the_name_that_flower_keeps(operator: OperatorFolder) -> None:
    book = RunBook(operator.apps)
    for name in ("first", "second"):
        book.note(name, bundle=BUNDLE)
    owners = book.find_owners(
        {"8": FlowerRun("running", BUNDLE, "second"), "9": FlowerRun("running", BUNDLE, "x")}
    )
    assert owners == {"first": [], "second": ["8"]}


def test_a_list_of_0_2_0_is_read(operator: OperatorFolder) -> None:
    book = RunBook(operator.apps)
    book.path(NAME).write_text('["7"]')
    assert book.list_recorded(NAME) == ["7"]
    book.path(NAME).write_text("{")
    with pytest.raises(StateError, match=r"trial\.runs\.json"):
        book.list_recorded(NAME)


def test_the_status_is_told_without_pytorch() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys, perennial.cli.deployment_status; sys.exit('torch' in sys.modules)",
    ]
    assert subprocess.run(command, check=False).returncode == 0
