"""Records that were corrected or removed after a run, and a resume that is refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from perennial import run as run_experiment
from perennial.cli.main import app
from perennial.client.learnt import PARTS
from perennial.config.experiment import load_experiment
from perennial.config.simulation import forget_simulated, load_simulated_federation
from perennial.foundation.errors import StateError
from perennial.models.saved import PERSONAL_MODEL
from tests.data.test_growth import MEMORY, closed_form, images, invoke, start, summary

AS_IT_WAS = "there is no new class and no new record: the run is as it would be"


def contents(run: Path) -> dict[str, bytes]:
    """What a run's folder holds, without what a process that is gone leaves there."""
    passing = {"lock", "alive", "experiment.resumed.yaml"}
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in passing
    }


def list_files(run: Path, part: str, name: str) -> list[Path]:
    """The files of one part and class, at all sites."""
    forget_simulated()
    experiment = load_experiment(run / "experiment.yaml")
    federation, found = load_simulated_federation(experiment), set[str]()
    assert part in PARTS and experiment.data.path is not None
    for site in federation.sites.values():
        label = federation.classes.index(name)
        rows = site.find_task_indices(part, label, label + 1).tolist()
        found |= {site.places[row] for row in rows if site.places is not None}
    forget_simulated()
    return [Path(experiment.data.path) / place for place in sorted(found)]


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = closed_form(tmp_path, head="ridge")
    images(tmp_path / "images" / "B", "c", 6, first=200)
    before = contents(run)
    assert any(name.endswith(PERSONAL_MODEL) for name in before)
    assert any("/learnt/task-00001" in name for name in before)
    for changes in (["--seed", "2"], ["--set", "data.test_fraction=0.3"]):
        done = CliRunner().invoke(app, ["run", "--resume", str(run), *changes])
        assert done.exit_code != 0, changes
        assert contents(run) == before, changes
    with pytest.raises(StateError, match="the experiment differs"):
        run_experiment(resume=run, seed=7)
    assert contents(run) == before
    shutil.rmtree(tmp_path / "images")
    assert CliRunner().invoke(app, ["run", "--resume", str(run), "--seed", "2"]).exit_code != 0
    assert contents(run) == before, "without data"


@pytest.mark.parametrize("natural", [True, False], ids=["sites that exist", "a simulated division"])
def test_records_that_choose_and_judge_are_corrected_and_removed(tmp_path: Path, natural: bool) -> None:
    run = closed_form(tmp_path, head="auto")
    if not natural:
        run = divide_anew(tmp_path)
    before, written = summary(run), (run / "statistics").stat().st_mtime_ns
    for part in ("validation", "test"):
        correct_labels(list_files(run, part, "b"))
    assert "known with another class" in (told := invoke("check", "--resume", run))
    words = "validation, calibration or test records have changed: what they chose is chosen anew"
    assert words in told and ("sums of" in told) != natural, "a division moves records with their classes"
    assert words in invoke("run", "--resume", run)
    require_as_anew(tmp_path, run)
    after = summary(run)
    assert after["accuracy_matrix"] != before["accuracy_matrix"]
    assert after["analytic"]["sums_sha256"] == before["analytic"]["sums_sha256"]
    if natural:
        assert (run / "statistics").stat().st_mtime_ns == written, "nobody's sums were asked again"
    for part in ("test", "train", "validation"):
        list_files(run, part, "a")[0].unlink()
    assert "3 records of known classes are there no more" in invoke("check", "--resume", run)
    told = invoke("run", "--resume", run)
    assert words in told and "they alone are asked again" in told
    require_as_anew(tmp_path, run)


def test_maps_that_records_chose_are_chosen_anew(tmp_path: Path) -> None:
    closed_form(tmp_path, head="ridge")
    content = yaml.safe_load((tmp_path / "growing.yaml").read_text())
    small = {"name": "patches", "filters": 4, "size": 3, "grid": 2}
    content["model"]["features"] = [[small, small | {"symmetry": "mirror"}]]
    content["strategy"]["head"] = "auto"
    (tmp_path / "growing.yaml").write_text(yaml.safe_dump(content))
    invoke("run", tmp_path / "growing.yaml", "--runs", tmp_path / "choosing")
    run = tmp_path / "choosing" / "growing"
    assert AS_IT_WAS in invoke("check", "--resume", run)
    correct_labels(list_files(run, "validation", "b"))
    list_files(run, "train", "a")[0].unlink()
    told = invoke("run", "--resume", run)
    assert "the feature maps are chosen anew too" in told and "they alone" not in told
    require_as_anew(tmp_path, run)


def correct_labels(paths: list[Path]) -> None:
    """Make class c of records of another class."""
    for path in paths:
        there = path.parent.parent / "c" / f"was-{path.name}"
        there.parent.mkdir(exist_ok=True)
        path.rename(there)


def divide_anew(folder: Path) -> Path:
    """The same images, divided among three sites, and learnt in two tasks."""
    for site in "AB":
        for path in sorted((folder / "images" / site).glob("*/*")):
            there = folder / "all" / path.parent.name / f"{site}-{path.name}"
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, there)
    content = yaml.safe_load((folder / "growing.yaml").read_text())
    content["data"] |= {"path": str(folder / "all"), "sites": 3, "partition": {"kind": "iid"}}
    content["tasks"] = {"increments": [2, 1], "rounds": 1}
    (folder / "growing.yaml").write_text(yaml.safe_dump(content))
    invoke("run", folder / "growing.yaml", "--runs", folder / "divided")
    return folder / "divided" / "growing"


def require_as_anew(folder: Path, run: Path) -> None:
    """A resumed run is the one that begins with the records as they are, and finds no more to do."""
    shutil.rmtree(folder / "anew", ignore_errors=True)
    invoke("run", folder / "growing.yaml", "--runs", folder / "anew")
    anew, found = summary(folder / "anew" / "growing"), summary(run)
    for name in ("model_sha256", "accuracy_matrix", "federated_accuracy", "head_choice", "map_choice"):
        assert found.get(name) == anew.get(name), name
    assert AS_IT_WAS in invoke("check", "--resume", run)
    assert "have changed" not in invoke("run", "--resume", run)


def test_copies_of_a_record_at_several_sites_are_no_change(tmp_path: Path) -> None:
    """Also where they contradict each other."""
    generator = np.random.default_rng(0)
    rows = [f"{generator.integers(4)},{generator.integers(3)},{'abc'[index % 3]}" for index in range(240)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,label", *rows]))
    content: dict[str, Any] = {
        **{"name": "copies", "tasks": {"count": 3, "rounds": 1}},
        "data": {"source": "csv", "path": str(tmp_path / "t.csv"), "sites": 4, "validation_fraction": 0.2},
        "model": {"name": "features", "features": ["inputs"]},
        "strategy": {"name": "analytic", "head": "ridge"},
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(content))
    invoke("run", tmp_path / "e.yaml", "--runs", tmp_path)
    told = invoke("check", "--resume", tmp_path / "copies")
    assert "have changed" not in told and "sums of" not in told, told


def test_figures_of_tasks_before_a_new_class_stay(tmp_path: Path) -> None:
    run = closed_form(tmp_path, head="ridge")
    before = summary(run)
    correct_labels(list_files(run, "test", "b"))
    images(tmp_path / "images" / "A", "d", 25)
    words = "the new task is measured with them, figures of earlier ones stay"
    assert words in invoke("check", "--resume", run)
    assert words in invoke("run", "--resume", run)
    assert summary(run)["accuracy_matrix"][0] == before["accuracy_matrix"][0]
    assert AS_IT_WAS in invoke("check", "--resume", run)


def test_a_program_is_told_too_and_of_a_network_that_nothing_is_made_anew(tmp_path: Path) -> None:
    run = start(tmp_path, memory=MEMORY)
    before = summary(run)
    correct_labels(list_files(run, "test", "b"))
    words = "nothing is made anew: model and figures stay those of the records before"
    assert words in invoke("check", "--resume", run)
    assert words in invoke("run", "--resume", run)
    with pytest.warns(UserWarning, match=words):
        again = run_experiment(resume=run)
    assert again.summary["accuracy_matrix"] == before["accuracy_matrix"]
