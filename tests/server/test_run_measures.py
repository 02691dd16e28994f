"""Measures of whole runs: what sites tell adds up to what the server counts, masks change nothing, and what a
policy keeps does not leave."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from perennial.cli.run import run_command
from perennial.client.handlers import answer_evaluate
from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation_tables import EvaluationTables
from perennial.library import Model
from perennial.models.saved import load_saved
from perennial.protocol.messages import EvaluateReply, EvaluateRequest
from perennial.protocol.tensors import Tensors
from perennial.server.measures.record import Measures, read_measures
from perennial.server.rounds import History
from perennial.server.run_measures import measure_task
from perennial.server.site_counts import SiteCounts, check_tables, read_tables
from tests.client.test_site_demands import arrays, hospital, stamp
from tests.run_folders import Page
from tests.strategies.test_secure_runs import SMALL, write

NOT_SECURE = {"secure": None}


def measured(folder: Path, **changes: Any) -> Measures:
    run_in_process(RunSettings(write(folder, **changes), runs=str(folder / "runs")))
    found = read_measures(folder / "runs" / "secure")
    assert found is not None
    return found


def data(**more: Any) -> dict[str, Any]:
    return SMALL["data"] | more


def test_the_sites_together_tell_what_the_server_counts(tmp_path: Path) -> None:
    central = measured(tmp_path / "central", **NOT_SECURE)
    sites = measured(tmp_path / "sites", evaluation={"central": False}, **NOT_SECURE)
    masked = measured(tmp_path / "masked", evaluation={"central": False})
    assert (central.source, sites.source, masked.source) == ("server", "sites", "sites")
    assert central.confusion == sites.confusion == masked.confusion
    assert central.classes == sites.classes == masked.classes
    assert central.calibration == sites.calibration == masked.calibration
    assert central.calibration.temperature is not None
    assert list(sites.sites) == ["site-0", "site-1", "site-2", "site-3"]
    assert sum(site.samples for site in sites.sites.values()) == sites.samples
    assert masked.sites == {}


def test_prediction_sets_reach_the_model_file_and_the_report(tmp_path: Path) -> None:
    found = measured(
        tmp_path, data=data(calibration_fraction=0.4), evaluation={"coverage": 0.7}, **NOT_SECURE
    )
    sets = found.prediction_sets
    assert sets is not None and not sets.void and len(sets.thresholds) == 10
    folder = tmp_path / "runs" / "secure"
    saved = load_saved(folder / "model.safetensors").confidence
    assert saved.thresholds == tuple(each.log_odds for each in sets.thresholds.values())
    assert (saved.coverage, saved.temperature) == (0.7, found.calibration.temperature)
    page = Page(folder / "report.html")
    assert page.sections[0] == "what-it-recognises"
    assert "Prediction sets, coverage 70" in page.text
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["measures"]["headline"] == found.headline


def test_measures_of_an_earlier_task_are_not_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("curriculum", "evaluation"):
        monkeypatch.setattr(f"perennial.server.{module}.MOST_CLASSES", 5)
    changes = {"data": data(calibration_fraction=0.4), "evaluation": {"coverage": 0.7}}
    run_in_process(
        RunSettings(
            write(tmp_path, tasks={"count": 2, "rounds": 1}, **changes, **NOT_SECURE), runs=str(tmp_path)
        )
    )
    folder = tmp_path / "secure"
    assert read_measures(folder) is None
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["measures"] is None and summary["final_accuracy"] is not None
    answers = Model(load_saved(folder / "model.safetensors")).answers(torch.zeros(1, 1, 8, 8).to(torch.uint8))
    assert answers.sets is None and answers.probabilities.shape == (1, 10)


def evaluate(
    folder: Path, answers: list[str], experiment: dict[str, Any] | None = None, **policy: Any
) -> Any:
    evaluation = {"evaluation": {"federated": True}}
    site = hospital(folder, {"answers": answers, **policy}, **evaluation, **(experiment or {}))
    request = EvaluateRequest(**stamp(site), arrays=arrays(site), tables=True)
    return site, answer_evaluate(site, request)


def test_a_site_sends_tables_only_if_its_policy_says_so(tmp_path: Path) -> None:
    _, silent = evaluate(tmp_path / "silent", ["train", "evaluate"])
    assert silent.tables is None and sum(silent.total) > 0
    _, told = evaluate(tmp_path / "told", ["train", "evaluate", "measures"])
    tables = read_tables(told, 0)
    assert (tables.correct, tables.total) == (told.correct, told.total)
    check_tables(told, 0, asked=True)


def test_samples_of_a_class_below_the_floor_are_in_no_table(tmp_path: Path) -> None:
    site, told = evaluate(tmp_path, ["train", "evaluate", "measures"], min_samples=4)
    held = site.data.counts("test", told.num_classes)
    assert told.withheld and all(held[label] > 0 for label in told.withheld)
    tables = read_tables(told, 0)
    assert not tables.confusion[told.withheld].any() and not tables.positive[told.withheld].any()
    assert tables.samples == sum(told.total)
    assert tables.negative.sum(axis=1).tolist() == [tables.samples - n for n in tables.total]
    check_tables(told, 0, asked=True)


def test_tables_that_cannot_be_true_are_refused(tmp_path: Path) -> None:
    _, told = evaluate(tmp_path, ["train", "evaluate", "measures"])

    def forged(change: Any) -> EvaluateReply:
        tables = read_tables(told, 0)
        change(tables)
        return replace(told, tables=Tensors(counts=torch.from_numpy(tables.vector())))

    def one_more(tables: EvaluationTables) -> None:
        tables.confusion[0, 0] += 1

    def negative(tables: EvaluationTables) -> None:
        tables.calibration[0, 0] = -1

    def surer(tables: EvaluationTables) -> None:
        tables.confidence[1, 1] = tables.confidence[1, 0] + 1

    for change in (one_more, negative, surer):
        with pytest.raises(ProtocolError, match="tables"):
            check_tables(forged(change), 0, asked=True)
    with pytest.raises(ProtocolError, match="expected"):
        check_tables(replace(told, tables=Tensors(counts=torch.zeros(3, dtype=torch.int64))), 0, asked=True)
    with pytest.raises(ProtocolError, match="not asked"):
        check_tables(told, 0, asked=False)


def test_suppressed_counts_void_the_stated_coverage(tmp_path: Path) -> None:
    changes = {"data": data(calibration_fraction=0.3), "evaluation": {"coverage": 0.5}}
    experiment = Experiment.model_validate(SMALL | NOT_SECURE | changes)
    counts = SiteCounts({})
    counts.tables.total = EvaluationTables.empty(2)
    counts.tables.total.confusion[...] = [[5, 1], [1, 5]]
    found = measure_task(experiment, 1, ["a", "b"], None, None, counts)
    assert found is not None and found.prediction_sets is not None and not found.prediction_sets.void
    counts.tables.suppressed = 1
    found = measure_task(experiment, 1, ["a", "b"], None, None, counts)
    assert found is not None and found.prediction_sets is not None
    assert "not guaranteed" in found.prediction_sets.void


def patients(path: Path) -> dict[str, Any]:
    """A table in which the mark tells the class of women and nothing of men; `sex` has a third value, too."""
    generator = np.random.default_rng(4)
    rows = ["mark,sex,label"]
    for index in range(900):
        label, sex = index % 3, ("f", "m", "x")[0 if index % 2 else 1 if index % 20 else 2]
        mark = 4 * label if sex == "f" else 0
        rows.append(f"{mark + generator.normal():.3f},{sex},kind-{label}")
    path.write_text("\n".join(rows))
    return {
        "source": "csv",
        "path": str(path),
        "sites": 2,
        "test_fraction": 0.4,
        "subgroup": {"column": "sex", "values": ["f", "m"]},
    }


@pytest.mark.parametrize("secure", [None, {"least": 3}])
def test_a_subgroup_that_is_served_worse_is_shown_first(
    tmp_path: Path, secure: dict[str, Any] | None
) -> None:
    data = patients(tmp_path / "patients.csv") | {"sites": 4}
    learner = {"preset": "none", "optimizer": {"lr": 0.1}, "epochs": 6}
    tasks, model = {"count": 1, "rounds": 6}, {"name": "mlp", "hidden": [16]}
    found = measured(tmp_path, data=data, learner=learner, secure=secure, tasks=tasks, model=model)
    assert found.subgroup_column == "sex" and list(found.subgroups) == ["f", "m"]
    women, men = found.subgroups["f"], found.subgroups["m"]
    assert women.accuracy.value is not None and men.accuracy.value is not None
    assert women.accuracy.value > men.accuracy.value + 0.2
    assert men.lower and not women.lower
    assert any("class for class and beyond chance, by sex: m" in text for text in found.headline)
    # the third value is in no subgroup
    assert 0 < women.samples + men.samples < found.samples
    assert "By sex" in (tmp_path / "runs" / "secure" / "report.html").read_text()


def test_a_floor_keeps_small_cells_of_a_subgroup(tmp_path: Path) -> None:
    data = patients(tmp_path / "patients.csv")
    tasks, model = {"count": 1, "rounds": 1}, {"name": "mlp", "hidden": [4]}
    changes = {"data": data, "tasks": tasks, "model": model}
    _, whole = evaluate(tmp_path / "whole", ["train", "evaluate", "measures"], changes)
    all_cells = read_tables(whole, 2).subgroups[:, :, 0]
    least = int(all_cells.min()) + 1
    _, told = evaluate(tmp_path / "floor", ["train", "evaluate", "measures"], changes, min_samples=least)
    cells = read_tables(told, 2).subgroups[:, :, 0]
    assert ((cells == 0) | (cells >= least)).all() and (cells == 0).sum() >= 1
    check_tables(told, 2, asked=True)


EXPERIMENT = {
    "name": "unseen",
    "data": {"source": "digits", "sites": 2, "samples_limit": 60, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
}
NOBODY = {"central": False, "federated": False}


def write_unseen(folder: Path, **changes: object) -> Path:
    path = folder / "unseen.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return path


def test_without_test_samples_and_without_counts_nothing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(write_unseen(tmp_path, evaluation=NOBODY), [], None, "", tmp_path, 1, "cpu", None, None)
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
    history.record_task([0, 1], None, SiteCounts({"north": ([9], [10])}))
    facts = history.record_task([0, 1, 2], None, SiteCounts({}))
    assert facts["accuracy"] == history.data["central"][1] == [None, None]
    assert facts["average_accuracy"] is None
    assert history.data["average"] == history.data["federated"] == [0.9, None]
