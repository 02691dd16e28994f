"""Taking a site back out of a closed-form run, and the statements that somebody else can check."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from perennial import Source
from perennial import run as run_experiment
from perennial.cli.main import app
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import hash_file
from perennial.models.saved import load_saved
from perennial.server.opened_run import OpenedRun
from perennial.server.report.card import write_card
from perennial.server.verification import verify
from perennial.server.withdrawal import describe_next_steps, list_leftovers, withdraw, withdraw_records
from perennial.strategies.analytic.kept import FOLDER
from tests.strategies.test_analytic_runs import run

DATA = {"partition": {"kind": "iid"}, "validation_fraction": 0.0}
TASKS = {"count": 2, "rounds": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder, "whole", data=DATA, tasks=TASKS)
    away = [{"site": "site-2", "first_round": 1}]
    run(folder, "without", data=DATA, tasks=TASKS, absence=away)
    only = [{"site": f"site-{k}", "first_round": 1} for k in (0, 1, 3)]
    run(folder, "alone", data=DATA, tasks=TASKS, absence=only)
    return folder / "runs"


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_withdrawn_site_was_never_there(runs: Path) -> None:
    statements = withdraw(runs / "whole", "site-2")
    found, never = summary(runs / "whole"), summary(runs / "without")
    assert found["analytic"]["sums_sha256"] == never["analytic"]["sums_sha256"]
    assert found["model_sha256"] == never["model_sha256"]
    a, b = (load_file(runs / name / "model.safetensors") for name in ("whole", "without"))
    assert all(a[key].equal(b[key]) for key in b)
    assert statements is not None and "site-2" not in {
        row["site"] for row in json.loads(statements.read_text())["statements"]
    }


def test_summary_report_and_card_say_what_is_left(runs: Path) -> None:
    folder = runs / "whole"
    before = summary(folder)
    write_card(folder)
    withdraw(folder, "site-2")
    assert "card.md" in list_leftovers(folder) and "report.html" not in list_leftovers(folder)
    found, never = summary(folder), summary(runs / "without")
    assert found["analytic"]["samples"] == never["analytic"]["samples"] < before["analytic"]["samples"]
    assert found["analytic"]["shrinkage"] == never["analytic"]["shrinkage"]
    assert found["analytic"]["withdrawn"] == ["site-2"] and not found["analytic"]["withdrawn_in_part"]
    assert found["model_file_sha256"] == hash_file(folder / "model.safetensors")
    assert {site: facts["samples"] for site, facts in found["sites"].items()} == {
        site: facts["samples"] for site, facts in never["sites"].items()
    }
    told = "Withdrawn: site-2. Nobody has measured the model since"
    card = write_card(folder).read_text()
    assert told in card and "Trained by 3 sites" in card and "| site-2 |" not in card
    assert told in (folder / "report.html").read_text()


@pytest.mark.parametrize("resumed", [False, True])
def test_no_figure_of_the_model_before_is_given_for_the_new_one(tmp_path: Path, resumed: bool) -> None:
    """Neither in summary, report and card nor as the model's calibration, also when the run is resumed."""
    data = DATA | {"calibration_fraction": 0.2}
    settings: dict[str, Any] = {"data": data, "tasks": TASKS, "evaluation": {"coverage": 0.8}}
    before = run(tmp_path, "whole", **settings)
    folder = tmp_path / "runs" / "whole"
    assert before["final_accuracy"] > 0.5 and load_saved(folder / "model.safetensors").confidence.thresholds
    withdraw(folder, "site-2")
    if resumed:
        run(tmp_path, "whole", resume="yes", **settings)
    found = summary(folder)
    assert found["analytic"]["withdrawn"] == ["site-2"] and set(found["sites"]) == {
        "site-0",
        "site-1",
        "site-3",
    }
    assert found["measures"] is found["final_accuracy"] is found["sites"]["site-0"]["accuracy"] is None
    assert found["accuracy_matrix"] == [[None], [None, None]] and not (folder / "measures.json").exists()
    card, page = write_card(folder).read_text(), (folder / "report.html").read_text()
    assert "Nobody measured this model" in card and "Prediction sets" not in card
    assert "nobody measured how well the model tells all 10 classes apart" in page and "site-2 10" not in page
    confidence = load_saved(folder / "model.safetensors").confidence
    assert confidence.thresholds is confidence.temperature is None and "withdrawn" in confidence.void
    sample = tmp_path / "one.npz"
    np.savez(sample, x=np.zeros((1, *load_saved(folder / "model.safetensors").inputs.shape), np.uint8))
    told = CliRunner().invoke(app, ["predict", str(folder), str(sample)], catch_exceptions=False)
    assert "without prediction sets: records were withdrawn" in told.stderr


@pytest.mark.parametrize("chosen", ["gcv", 0.5])
def test_the_summary_has_the_shrinkage_of_the_new_head(tmp_path: Path, chosen: object) -> None:
    away = [{"site": "site-2", "first_round": 1}]
    strategy = {"head": "ridge", "shrinkage": chosen}
    run(tmp_path, "whole", data=DATA, strategy=strategy, tasks={"count": 1, "rounds": 1})
    run(tmp_path, "without", data=DATA, strategy=strategy, tasks={"count": 1, "rounds": 1}, absence=away)
    withdraw(tmp_path / "runs" / "whole", "site-2")
    found, never = (summary(tmp_path / "runs" / name)["analytic"] for name in ("whole", "without"))
    assert found["shrinkage"] == never["shrinkage"]
    withdraw(tmp_path / "runs" / "whole", "site-1", shrinkage=2.0)
    assert summary(tmp_path / "runs" / "whole")["analytic"]["shrinkage"] == {"1": 2.0}


def test_nothing_of_the_site_is_left_in_the_folder(runs: Path) -> None:
    before = summary(runs / "whole")["analytic"]["sums_sha256"]
    models = {path.name for path in (runs / "whole" / "checkpoint").glob("previous-*")}
    withdraw(runs / "whole", "site-2")
    assert not list((runs / "whole" / "statistics").glob("site-2-*"))
    assert not models & {path.name for path in (runs / "whole" / "checkpoint").glob("previous-*")}
    from perennial.learning.analytic.statistics import Statistics

    for name in ("latest", "before"):
        tensors = load_file(runs / "whole" / "checkpoint" / f"{name}.safetensors")
        gram, sums, counts = (tensors[f"strategy/all-{part}"] for part in ("gram", "sums", "counts"))
        assert Statistics(gram, sums, counts, range(10)).sha256 != before


def test_a_third_party_checks_the_statements_from_the_folder(runs: Path) -> None:
    statements = withdraw(runs / "whole", "site-2")
    assert statements is not None
    assert (
        "6 signed sums of 3 sites" in verify(statements)[0]
        and "follows from settings" in verify(statements)[0]
    )
    # another model, other sums, or what should be gone, is noticed
    kept = runs / "whole" / "statistics"
    (kept / "site-0-task-0001.safetensors").rename(runs / "aside")
    with pytest.raises(StateError, match="missing or damaged"):
        verify(statements)
    (runs / "aside").rename(kept / "site-0-task-0001.safetensors")
    shutil.copy(runs / "alone" / "statistics" / "site-2-task-0001.safetensors", kept)
    with pytest.raises(StateError, match="no statement is of these sums"):
        verify(statements)
    (kept / "site-2-task-0001.safetensors").unlink()
    shutil.copy(runs / "alone" / "model.safetensors", runs / "whole" / "model.safetensors")
    with pytest.raises(StateError, match="is not what the sums give"):
        verify(statements)


def test_a_withdrawal_that_was_stopped_is_completed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perennial.server.opened_run.OpenedRun.write_model", stop)
    with pytest.raises(KeyboardInterrupt):
        withdraw(runs / "whole", "site-2")
    monkeypatch.undo()
    certificate = withdraw(runs / "whole", "site-2")
    assert certificate is not None
    verify(certificate)
    assert summary(runs / "whole")["model_sha256"] == summary(runs / "without")["model_sha256"]


def test_a_class_that_only_the_site_held_is_named_and_never_predicted(tmp_path: Path) -> None:
    groups = {"kind": "class_subset", "classes_per_site": 1}
    run(tmp_path, "subset", data={"partition": groups, "validation_fraction": 0.0, "sites": 4})
    folder = tmp_path / "runs" / "subset"
    assert withdraw(folder, "site-1") is not None
    model = load_saved(folder / "model.safetensors")
    for name in OpenedRun.open(folder).strategy.withdrawn["site-1"]["classes_removed"]:
        assert model.model.head.bias[model.classes.index(name)] == -1e9


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"keep_sites": False}, "own sums were kept"),
        ({"keep_sites": False, "head": "auto", "shrinkage": None}, "keep_sites is false"),
    ],
)
def test_what_cannot_be_withdrawn_is_refused(tmp_path: Path, strategy: dict[str, Any], message: str) -> None:
    run(tmp_path, "run", data=CHOOSES, tasks=TASKS, strategy=strategy)
    with pytest.raises((ConfigError, StateError), match=message):
        withdraw(tmp_path / "runs" / "run", "site-1")


CHOOSES = DATA | {"validation_fraction": 0.2}
PATCHES = [[{"name": "patches", "filters": 12, "size": size} for size in (3, 4)]]


@pytest.mark.parametrize(
    ("strategy", "features"),
    [
        ({"head": "balanced_ridge", "shrinkage": 0.1}, [{"name": "random", "width": 60}]),
        ({"head": "ridge", "shrinkage": "validation"}, [{"name": "random", "width": 60}]),
        ({"head": "auto", "shrinkage": None}, [{"name": "random", "width": 60}]),
        ({"head": "auto", "shrinkage": None}, PATCHES),
    ],
    ids=["balanced", "validation", "auto", "maps"],
)
def test_a_head_that_samples_chose_is_chosen_again_without_the_site(
    tmp_path: Path, strategy: dict[str, Any], features: list[dict[str, Any]]
) -> None:
    said = {
        "data": CHOOSES,
        "tasks": TASKS,
        "strategy": strategy,
        "model": {"name": "features", "features": features},
    }
    run(tmp_path, "run", **said)
    folder = tmp_path / "runs" / "run"
    before = sorted((folder / "checkpoint").glob("previous-*"))
    (folder / "exported.onnx").write_bytes(b"")
    os.utime(folder / "exported.onnx", (0, 0))
    assert withdraw(folder, "site-2") is None
    assert withdraw(folder, "site-2") is None, "said twice, it is done once"
    left = [*folder.glob("statistics/site-2-*"), *before]
    assert not [path for path in (folder / "model.safetensors", *left) if path.exists()]
    told = " ".join(describe_next_steps(folder, "site-2"))
    assert (
        f"perennial run --resume {folder}" in told and f"{folder / 'exported.onnx'}: may still hold" in told
    )
    found = run(tmp_path, "run", resume="yes", **said)
    never = run(tmp_path, "never", absence=[{"site": "site-2", "first_round": 1}], **said)
    assert found["model_sha256"] == never["model_sha256"]
    saved, other = (load_saved(tmp_path / "runs" / name / "model.safetensors") for name in ("run", "never"))
    assert saved.confidence == other.confidence
    assert withdraw(folder, "site-2") is None and (folder / "model.safetensors").exists()
    assert "nothing was changed" in " ".join(describe_next_steps(folder, "site-2"))
    with pytest.raises(StateError, match="its sums are in no task"):
        withdraw(folder, "site-9")


@pytest.mark.parametrize("name", ["missing", "notes"])
def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    for call in (
        lambda: withdraw(tmp_path / name, "A"),
        lambda: withdraw_records(tmp_path / name, "A", tmp_path / "group"),
    ):
        with pytest.raises(StateError, match=f"{name}: no run to withdraw from here"):
            call()
    assert [*tmp_path.rglob("*")] == [tmp_path / "notes"]


@pytest.mark.parametrize("names", [["graz", "graz-task-0002", "linz"], ["ward [1]", "ward 1", "a*"]])
def test_a_withdrawal_takes_the_files_of_sites_with_like_names_for_theirs(
    tmp_path: Path, names: list[str]
) -> None:
    x, y = load_digits(return_X_y=True)
    content = {
        "name": "like",
        "model": {"name": "features", "features": [{"name": "random", "width": 20}]},
        "tasks": {"count": 2, "rounds": 1},
        "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.1},
    }
    site = np.resize(names, 300)
    run_experiment(content, data=Source.of(x[:300].astype("float32"), y[:300], site=site), runs=tmp_path)
    folder = tmp_path / "like"
    said = CliRunner().invoke(app, ["check", "--resume", str(folder)]).output
    assert "there is no new class and no new record" in said
    withdraw(folder, names[0])
    left = {path.name.partition("-task-0001.")[0] for path in (folder / FOLDER).glob("*-task-0001.*")}
    assert left == set(names[1:])
    verify(folder)
    withdraw(folder, names[1])
    assert len([*(folder / FOLDER).glob("*.safetensors")]) == 2
