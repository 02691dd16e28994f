"""submit, pause, resume and stop, in every order: one run at a time, and words for what is."""

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from perennial.cli.main import refuse_former
from perennial.deploy import operations
from perennial.deploy.application import Application
from perennial.deploy.control import FlowerRun
from perennial.deploy.federation import Federation, OperatorFolder, create_operator_folder
from perennial.deploy.operations import pause, resume, stop, submit
from perennial.foundation.errors import ConfigError, StateError
from perennial.server.control import read_request, write_request
from perennial.server.withdrawal import withdraw
from tests.strategies.test_analytic_runs import own_cache, run

__all__ = ["own_cache"]
NAME = "trial"
APP = f"\napp x.fab, SHA-256 {'0' * 64}"


class Flower:
    """The runs that the Control API knows."""

    def __init__(self, operator: OperatorFolder) -> None:
        self.operator, self.runs = operator, dict[str, str]()

    def list_runs(self, folder: OperatorFolder) -> dict[str, FlowerRun]:
        return {run: FlowerRun(status) for run, status in self.runs.items()}

    def start_run(self, *arguments: object) -> str:
        run = str(len(self.runs) + 1)
        self.runs[run] = "running"
        (self.operator.state / "runs" / NAME).mkdir(exist_ok=True)
        return run

    def stop_run(self, folder: OperatorFolder, run: str) -> None:
        assert self.runs[run] == "running"
        self.runs[run] = "finished:stopped"

    @property
    def going(self) -> list[str]:
        return [run for run, status in self.runs.items() if status == "running"]

    def end(self, status: str) -> None:
        self.runs |= dict.fromkeys(self.going, status)


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OperatorFolder]:
    settings = Federation(name="trials", hosts=("127.0.0.1",), runtime="process")
    folder = create_operator_folder(tmp_path / "operator", settings, 2)
    staged = Application(folder.apps / NAME, folder.apps / "x.fab", "0" * 64)

    def stage(*_: object) -> Application:
        return staged

    monkeypatch.setattr(operations, "stage", stage)
    monkeypatch.setattr(operations, "read_application", stage)
    yield folder


VERBS = ("submit", "pause", "resume", "stop", "dies", "completes")


def test_every_order_of_commands_leaves_one_run_that_answers(
    operator: OperatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder, runs_file = operator.state / "runs" / NAME, operator.apps / f"{NAME}.runs.json"
    for verbs in product(VERBS, repeat=4):
        runs_file.unlink(missing_ok=True)
        operations.clear_request(run_folder)
        flower = Flower(operator)
        monkeypatch.setattr(operations, "control", flower)
        for verb in verbs:
            before = list(flower.going), len(flower.runs), read_request(run_folder)
            said = _said(operator, flower, verb)
            going, paused = flower.going, read_request(run_folder) == "pause"
            assert len(going) <= 1, verbs
            if verb in ("dies", "completes"):
                continue
            changed = before != (going, len(flower.runs), read_request(run_folder))
            again, there = _said(operator, flower, verb), (list(going), len(flower.runs))
            assert (flower.going, len(flower.runs)) == there, f"{verbs}: {verb} twice is {verb} once"
            assert "as Flower's run" not in again, "nothing is started by saying it again"
            # the state that is, not the one that was asked for
            if not changed:
                words = ("paused",) if paused else ("running",)
                words = words if going else ("finished", "ended", "not started")
                assert any(word in said for word in words), (verbs, verb, said)
            if "completed" in "".join(flower.runs.values()):
                assert flower.runs[max(flower.runs, key=int)] == "finished:completed", "never begun again"


def _said(operator: OperatorFolder, flower: Flower, verb: str) -> str:
    match verb:
        case "submit":
            return submit(operator, Path("x.yaml"), [], NAME, "cpu")
        case "pause":
            return pause(operator, NAME)
        case "resume":
            return resume(operator, NAME, "cpu")
        case "stop":
            return stop(operator, NAME)
    flower.end("finished:failed" if verb == "dies" else "finished:completed")
    return ""


def test_a_run_that_goes_on_is_not_started_again_and_can_still_be_stopped(
    operator: OperatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower = Flower(operator)
    monkeypatch.setattr(operations, "control", flower)
    assert submit(operator, Path("x.yaml"), [], NAME, "cpu") == f"trial: started as Flower's run 1{APP}"
    assert "trial: running (Flower's run 1)" in submit(operator, Path("x.yaml"), [], NAME, "cpu")
    assert "trial: running (Flower's run 1)" in resume(operator, NAME, "cpu")
    assert pause(operator, NAME).startswith("trial: pauses")
    assert "paused" in submit(operator, Path("x.yaml"), [], NAME, "cpu")
    assert stop(operator, NAME).startswith("trial: stopped") and flower.going == []
    assert "ended early (finished:stopped)" in stop(operator, NAME)
    assert resume(operator, NAME, "cpu") == f"trial: resumed as Flower's run 2{APP}"
    assert read_request(operator.state / "runs" / NAME) is None, "a pause of before does not hold it"
    flower.end("finished:completed")
    for done in (
        submit(operator, Path("x.yaml"), [], NAME, "cpu"),
        resume(operator, NAME, "cpu"),
        stop(operator, NAME),
    ):
        assert "trial: finished; " in done
    assert len(flower.runs) == 2


def test_a_finished_run_that_a_site_left_is_resumed_once(
    operator: OperatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooses = {"data": {"validation_fraction": 0.2}, "strategy": {"head": "auto", "shrinkage": None}}
    run(tmp_path, NAME, **chooses)
    shutil.copytree(tmp_path / "runs" / NAME, operator.state / "runs" / NAME)
    flower = Flower(operator)
    monkeypatch.setattr(operations, "control", flower)
    submit(operator, Path("x.yaml"), [], NAME, "cpu")
    flower.end("finished:completed")
    assert "trial: finished; " in resume(operator, NAME, "cpu")
    assert withdraw(operator.state / "runs" / NAME, "site-2") is None
    for command in (stop, pause):
        assert "without a site that withdrew; `perennial deploy resume trial`" in command(operator, NAME)
    assert resume(operator, NAME, "cpu") == f"trial: resumed as Flower's run 2{APP}"
    assert "trial: running (Flower's run 2)" in resume(operator, NAME, "cpu")


@pytest.mark.parametrize(
    ("old", "new"),
    [("unpause x", "deploy resume"), ("site go-on", "site resume"), ("forget runs/x", "withdraw RUN")],
)
def test_old_words_are_errors_that_name_the_new_ones(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"the command is now `perennial {new}"):
        refuse_former(old.split())
    refuse_former(["site", "resume"])
    with pytest.raises(StateError):
        write_request(Path("there is no such run"), "pause")
