"""What dashboards are told is what the journal says, once, also by a run that goes on."""

import logging
from pathlib import Path
from typing import Any

import pytest

from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.server.journal import read_events
from perennial.server.tracking.figures import figures
from perennial.server.tracking.listen import Listeners, trackers
from tests.run_folders import round_event
from tests.strategies.test_secure_runs import SMALL, write

PLAIN: dict[str, Any] = {"secure": None, "tasks": {"count": 1, "rounds": 3}}


def run(folder: Path, track: str, **changes: Any) -> Path:
    settings = RunSettings(write(folder, **PLAIN, **changes), runs=str(folder / "runs"), track=track)
    run_in_process(settings)
    return folder / "runs" / "secure"


def told(run: Path) -> dict[str, list[tuple[int, float]]]:
    """name -> (step, value) of every figure of the journal."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in read_events(run):
        for name, value, step in figures(event):
            found.setdefault(name, []).append((step, value))
    return found


def test_figures_of_an_event_leave_out_what_was_not_measured() -> None:
    found = {figure.name: figure for figure in figures(round_event(4, 2))}
    assert found["round/train_loss"] == ("round/train_loss", 0.25, 4)
    assert found["round/sites"].value == 2 and "round/accuracy" not in found
    finished = {"event": "task_finished", "task": 2, "accuracy": [0.5, None], "average_accuracy": None}
    assert list(figures(finished)) == [("task/accuracy of task 1", 0.5, 2)]
    assert not list(figures({"event": "note", "text": "x"}))


def test_tensorboard_reads_what_the_journal_says(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(tmp_path, "tensorboard")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    expected = told(folder)
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, values in expected.items():
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in values]
        assert [value for _, value in found] == pytest.approx([value for _, value in values], rel=1e-6)


def test_mlflow_reads_what_the_journal_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    folder = run(tmp_path, "mlflow")
    client, identity = MlflowClient(), (folder / "mlflow_run_id").read_text()
    kept = client.get_run(identity)
    assert kept.info.status == "FINISHED" and kept.data.params["tasks.rounds"] == "3"
    for name, values in told(folder).items():
        found = [(metric.step, metric.value) for metric in client.get_metric_history(identity, name)]
        assert sorted(found) == sorted(values)
    again = trackers("mlflow", folder, Experiment.model_validate(SMALL | PLAIN), first_round=4)
    again[0]({"event": "run_finished"})
    assert len(client.search_runs([kept.info.experiment_id])) == 1, "a resumed run goes on in its own"


def test_a_tracker_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def broken(event: dict[str, Any]) -> None:
        raise OSError("no space left")

    tell = Listeners(lambda event: heard.append(event["event"]), [broken])
    with caplog.at_level(logging.WARNING, "perennial.tracking"):
        for kind in ("round", "note"):
            tell({"event": kind})
    assert heard == ["round", "note"]
    assert [record.message for record in caplog.records] == [
        "track: function failed and gets no more events: no space left"
    ]


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found 'tensorbord'.*tensorboard"):
        trackers("tensorbord", tmp_path, Experiment.model_validate(SMALL | PLAIN), first_round=1)
