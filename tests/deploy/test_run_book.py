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
from perennial.foundation.errors import ConfigError, StateError
from perennial.server.control import read_split_key

NAME, BUNDLE, KEY = "trial", "a" * 64, "0f" * 32


class Flower:
    """The Control API; an answer can be lost on its way."""

    def __init__(self) -> None:
        self.runs: dict[str, FlowerRun] = {}
        self.lost: bool | str = False
        self.down = self.refuses = False

    def list_runs(self, folder: OperatorFolder) -> dict[str, FlowerRun]:
        if self.down:
            raise StateError("the SuperLink does not answer")
        return dict(self.runs)

    def start_run(self, folder: OperatorFolder, fab: bytes, digest: str, settings: Mapping[str, str]) -> str:
        self.list_runs(folder)
        assert RunBook(folder.apps).names() == [NAME], "the intent is on the disk before Flower is asked"
        if self.refuses:
            raise StateError("the SuperLink refuses start-run")
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


@pytest.mark.parametrize("key", ["abc", "0" * 63, "F" * 64, "é" * 64, " "])
def test_a_mistyped_split_key_is_refused_and_leaves_nothing(
    operator: OperatorFolder, flower: Flower, key: str
) -> None:
    with pytest.raises(ConfigError, match=r"--split-key: found .*, allowed 64 hexadecimal digits"):
        submit(operator, Path("x"), [], NAME, "cpu", key)
    assert not flower.runs and read_split_key(operator.state / "runs" / NAME) == ""
    assert "started" in submit(operator, Path("x"), [], NAME, "cpu", f" {KEY}\n")
    assert read_split_key(operator.state / "runs" / NAME) == KEY


def test_the_key_of_a_submit_that_started_no_run_is_not_that_of_a_later_one(
    operator: OperatorFolder, flower: Flower, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flower.refuses = operator.state / "runs" / NAME, True
    with pytest.raises(StateError, match="refuses"):
        submit(operator, Path("x"), [], NAME, "cpu", KEY)
    assert read_split_key(run) == ""
    flower.refuses = False

    def start_nothing(*_: object) -> str:
        flower.down = True
        raise StateError("the SuperLink does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(flower, "start_run", start_nothing)
        with pytest.raises(StateError, match="begins no second one"):
            submit(operator, Path("x"), [], NAME, "cpu", KEY)
    assert read_split_key(run) == KEY, "Flower may have taken the run"
    flower.down = False
    assert "started" in submit(operator, Path("x"), [], NAME, "cpu")
    assert read_split_key(run) == ""


def test_the_key_of_a_run_that_was_started_stays(operator: OperatorFolder, flower: Flower) -> None:
    run, flower.lost = operator.state / "runs" / NAME, "for longer"
    with pytest.raises(StateError, match="begins no second one"):
        submit(operator, Path("x"), [], NAME, "cpu", KEY)
    flower.down = flower.lost = False
    assert "running" in submit(operator, Path("x"), [], NAME, "cpu")
    assert "stopped" in stop(operator, NAME)
    flower.refuses = True
    with pytest.raises(StateError, match="refuses"):
        resume(operator, NAME, "cpu")
    flower.refuses = False
    assert "resumed" in resume(operator, NAME, "cpu")
    assert read_split_key(run) == KEY


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
