"""A run that measures nothing says so: no figure stands in for what nobody counted."""

import json
from pathlib import Path

import pytest
import yaml

from perennial.cli.run import run_command
from perennial.server.history import History
from perennial.server.site_counts import SiteCounts
from tests.run_folders import Page

EXPERIMENT = {
    "name": "unseen",
    "data": {"source": "digits", "sites": 2, "samples_limit": 60, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
}
NOBODY = {"central": False, "federated": False}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "unseen.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return path


def test_without_test_samples_and_without_counts_nothing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(write(tmp_path, evaluation=NOBODY), [], None, "", tmp_path, 1, "cpu", None, None)
    folder = tmp_path / "unseen"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_matrix"] == [[None], [None, None]]
    assert summary["average_accuracy"] == summary["federated_accuracy"] == [None, None]
    for measure in ("final_accuracy", "average_incremental_accuracy", "forgetting", "backward_transfer"):
        assert summary[measure] is None
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [event["average_accuracy"] for event in events if event["event"] == "task_finished"]
    assert told == [None, None]
    said = capsys.readouterr().out
    assert "task 2 learnt: accuracy not measured" in said
    assert "final accuracy -, average incremental accuracy -" in said
    assert "0.0 %" not in said
    page = Page(folder / "report.html")
    assert "nobody measured how well the model tells all 10 classes apart" in page.text
    assert "A dash or an empty cell was not measured" in page.text
    assert not {"accuracy-matrix", "accuracy-over-tasks"} & page.charts.keys()


def test_an_evaluation_that_no_site_answers_leaves_a_hole() -> None:
    history = History({})
    history.task_done([0, 1], None, SiteCounts({"north": ([9], [10])}))
    facts = history.task_done([0, 1, 2], None, SiteCounts({}))
    assert facts["accuracy"] == history.data["central"][1] == [None, None]
    assert facts["average_accuracy"] is None
    assert history.data["average"] == history.data["federated"] == [0.9, None]
