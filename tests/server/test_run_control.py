"""Pausing and stopping a run, and what it does while nobody can serve it."""

from pathlib import Path
from typing import Any

import pytest

from perennial.server import roster
from perennial.server.control import RunStopped, clear_request, read_request, write_request
from tests.live_pages import until
from tests.server.switched_grid import SwitchedRun


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model's hash of a run that nobody disturbed."""
    return SwitchedRun(tmp_path_factory.mktemp("undisturbed")).finish()["model_sha256"]


def test_a_paused_run_rests_at_a_round_and_ends_with_the_same_bits(tmp_path: Path, undisturbed: str) -> None:
    run = SwitchedRun(tmp_path)
    run.grid.delay = 0.1
    thread = run.start()
    until(lambda: run.events("round"))
    write_request(run.folder, "pause")
    paused = until(lambda: run.events("paused"))
    rounds = len(run.events("round"))
    thread.join(1.5)
    assert thread.is_alive() and len(run.events("round")) == rounds < 6
    assert paused[0]["reason"] == "paused by the operator"
    clear_request(run.folder)
    thread.join(60)
    assert run.error is None and run.events("went_on")
    assert run.summary["model_sha256"] == undisturbed


def test_a_pause_outlives_the_process_that_rested(tmp_path: Path, undisturbed: str) -> None:
    run = SwitchedRun(tmp_path)
    run.grid.delay = 0.1

    def killed(event: dict[str, Any]) -> None:
        if event["event"] == "paused":
            raise KeyboardInterrupt

    run.listener = killed
    thread = run.start()
    until(lambda: run.events("round"))
    write_request(run.folder, "pause")
    thread.join(60)
    assert isinstance(run.error, KeyboardInterrupt) and read_request(run.folder) == "pause"
    run.listener = None
    thread = run.start("yes")
    until(lambda: run.events("resumed") and run.events("paused"))
    assert len(run.events("round")) < 6
    clear_request(run.folder)
    thread.join(60)
    assert run.summary["model_sha256"] == undisturbed


def test_a_stop_ends_the_round_at_once_and_can_be_resumed(tmp_path: Path, undisturbed: str) -> None:
    run = SwitchedRun(tmp_path)
    run.grid.delay = 0.3
    thread = run.start()
    until(lambda: run.events("round"))
    write_request(run.folder, "stop")
    thread.join(10)
    assert isinstance(run.error, RunStopped) and run.events("stopped")
    assert read_request(run.folder) is None
    assert run.finish("yes")["model_sha256"] == undisturbed


def test_a_round_that_nobody_serves_is_asked_again_and_the_run_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    monkeypatch.setattr(roster, "FIRST_REST", 1000.0)
    run = SwitchedRun(tmp_path, "grpc", tasks={"count": 2, "rounds": 4})
    run.grid.delay = 0.05
    thread = run.start()
    until(lambda: run.events("round"))
    run.grid.lingering, run.grid.off = True, {1, 2, 3}
    paused = until(lambda: run.events("paused"))[-1]
    assert "site-0: error at the site or on the way: node unavailable" in paused["reason"]
    skipped = [event for event in run.events("round") if event["skipped"]]
    numbers = {event["round"] for event in skipped}
    assert len(skipped) == 3 and len(numbers) == 1, "three attempts at one round"
    run.grid.lingering = False
    thread.join(2.0)
    assert thread.is_alive()
    run.grid.off = {3}
    until(lambda: run.events("went_on"))
    assert run.events("went_on")[-1]["came"] == ["site-0", "site-1"]
    thread.join(60)
    assert run.error is None and run.summary["rounds"] == 8
    served = [event["round"] for event in run.events("round") if not event["skipped"]]
    assert served == list(range(1, 9)), "no planned round is used up"


def test_errors_that_the_superlink_makes_are_blamed_on_the_site_that_was_asked(tmp_path: Path) -> None:
    run = SwitchedRun(tmp_path, "grpc")
    run.grid.lingering, run.grid.delay = True, 0.05
    thread = run.start()
    until(lambda: run.events("round"))
    run.grid.off = {2}
    thread.join(60)
    last = run.events("round")[-1]
    assert [fault["site"] for fault in last["dropped"]] == ["site-1"]
    assert run.summary["sites"].keys() == {"site-0", "site-1", "site-2"}, "and no phantom is counted"
