"""A folder or table that grew goes on with a finished run, and needs of the old data what it uses alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.client.learnt import read_noted
from perennial.foundation.errors import PerennialError, StateError

MEMORY = {"selection": "random", "per_class": 4}


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def images(folder: Path, classes: str, per_class: int, first: int = 0) -> Path:
    """8 x 8 grey images in class folders; the class is the brightness."""
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(first, first + per_class):
            generator = np.random.default_rng([ord(name), index])
            level = 30 + 40 * (ord(name) - ord("a")) + generator.normal(0, 8, (8, 8))
            Image.fromarray(level.clip(0, 255).astype(np.uint8)).save(folder / name / f"{index}.png")
    return folder


def experiment(folder: Path, data: dict[str, Any], **learner: Any) -> Path:
    content = {
        "name": "growing",
        "data": {"sites": 2, **data},
        "tasks": {"count": 2, "rounds": 2},
        "model": {"name": "mlp", "hidden": [16]},
        "learner": {"optimizer": {"lr": 0.05}, "epochs": 2, **learner},
    }
    path = folder / "growing.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(folder: Path, **learner: Any) -> Path:
    images(folder / "images", "abcd", 30)
    path = experiment(
        folder, {"source": "folder", "path": str(folder / "images"), "color": "gray"}, **learner
    )
    invoke("run", path, "--runs", folder / "runs")
    return folder / "runs" / "growing"


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_a_folder_with_a_new_class_goes_on_by_itself_and_again(tmp_path: Path) -> None:
    run = start(tmp_path, memory=MEMORY)
    before = summary(run)
    images(tmp_path / "images", "e", 30)
    text = invoke("check", "--resume", run)
    assert "has learnt 4 classes in 2 tasks" in text and "would learn task 3: e (2 rounds)" in text
    assert "exemplars that sites chose are needed" in text
    assert summary(run) == before, "check changes nothing"
    invoke("run", "--resume", run)
    after = summary(run)
    assert after["classes"] == [*before["classes"], "e"]
    assert after["accuracy_matrix"][:2] == before["accuracy_matrix"]
    assert after["rounds"] == 6
    images(tmp_path / "images", "f", 30)
    invoke("run", "--resume", run)
    assert summary(run)["classes"] == [*after["classes"], "f"]
    assert summary(run)["tasks"][-2:] == [["e"], ["f"]]


def test_new_records_of_known_classes_are_learnt_with_the_next_new_class(tmp_path: Path) -> None:
    run = start(tmp_path, memory=MEMORY)
    folders = sorted(run.glob("sites/*/runs/*"))
    known = read_noted(folders, 3)
    assert len(folders) == 2 and len(known) == 120 and 60 < (known.part == 0).sum() < 110
    images(tmp_path / "images", "a", 20, first=30)
    text = invoke("check", "--resume", run)
    alone = (
        "training records of known classes are new, and there is no new class: nothing is learnt; they are"
    )
    assert alone in text and alone in invoke("run", "--resume", run)
    images(tmp_path / "images", "e", 30)
    assert "new records of known classes would be learnt with it" in invoke("check", "--resume", run)
    samples = {site: each["samples"] for site, each in summary(run)["sites"].items()}
    invoke("run", "--resume", run)
    grown = {site: each["samples"] for site, each in summary(run)["sites"].items()}
    # a task has the training records of one class and exemplars; the last one has the new records of `a` too
    assert sum(grown.values()) > sum(samples.values()) / 2 + 10
    assert "there is no new class and no new record" in invoke("check", "--resume", run)


def test_closed_form_says_of_new_records_that_its_sums_lack_them(tmp_path: Path) -> None:
    images(tmp_path / "images", "abcd", 30)
    data = {"source": "folder", "path": str(tmp_path / "images"), "color": "gray", "sites": 2}
    content = {
        **{"name": "growing", "data": data, "tasks": {"count": 2, "rounds": 1}, "strategy": "analytic"},
        "model": {"name": "features", "features": [{"name": "random", "width": 40}]},
    }
    path = tmp_path / "growing.yaml"
    path.write_text(yaml.safe_dump(content))
    run = tmp_path / "runs" / "growing"
    invoke("run", path, "--runs", tmp_path / "runs")
    assert "there is no new class and no new record" in invoke("check", "--resume", run)
    images(tmp_path / "images", "a", 20, first=30)
    for command in ("check", "run"):
        told = invoke(command, "--resume", run)
        assert "nothing is learnt; closed form adds up the records of a task once" in told
    images(tmp_path / "images", "e", 30)
    told = invoke("check", "--resume", run)
    assert (
        "would learn task 3: e" in told and "new records of known classes would not be learnt: closed" in told
    )
    assert "nothing is learnt" not in invoke("run", "--resume", run)
    assert summary(run)["tasks"][-1] == ["e"]


def test_old_data_are_not_needed_where_nothing_is_replayed(tmp_path: Path) -> None:
    run = start(tmp_path, distillation={"weight": 1.0, "temperature": 2.0})
    before = summary(run)
    for name in "abcd":
        shutil.rmtree(tmp_path / "images" / name)
    images(tmp_path / "images", "ef", 30)
    text = invoke("check", "--resume", run)
    assert "no record is there any more of" in text and "nothing of them is needed to train" in text
    invoke("run", "--resume", run)
    after = summary(run)
    assert after["classes"][:4] == before["classes"] and after["classes"][4:] == ["e", "f"]
    assert after["accuracy_matrix"][2][:2] == [None, None], "what has no sample is not measured"
    assert after["accuracy_matrix"][2][2] is not None


def test_exemplars_that_are_gone_are_missed_with_a_true_sentence(tmp_path: Path) -> None:
    run = start(tmp_path, memory=MEMORY)
    shutil.rmtree(tmp_path / "images" / "a")
    images(tmp_path / "images", "e", 30)
    for command in ("check", "run"):
        with pytest.raises(StateError, match=r"any more of a, whose exemplars learner\.memory replays"):
            invoke(command, "--resume", run)


def test_a_table_that_grew_is_read_as_it_was(tmp_path: Path) -> None:
    """The mean and the categories of the first run stay, although more rows would change them."""
    generator = np.random.default_rng(0)

    def rows(classes: str, shift: float) -> list[str]:
        return [
            f"{shift + 3 * ord(name) + generator.normal():.3f},{'xyz'[index % 3]},{name}"
            for name in classes
            for index in range(40)
        ]

    table = tmp_path / "patients.csv"
    first = ["age,ward,label", *rows("abcd", 0)]
    table.write_text("\n".join(first))
    run_of = experiment(tmp_path, {"source": "csv", "path": str(table)}, memory=MEMORY)
    invoke("run", run_of, "--runs", tmp_path / "runs")
    run = tmp_path / "runs" / "growing"
    table.write_text("\n".join([*first, *rows("e", 90)]))
    invoke("run", "--resume", run)
    stored = yaml.safe_load((run / "experiment.yaml").read_text())
    ages = [float(line.split(",")[0]) for line in first[1:]]
    assert stored["data"]["normalise"]["mean"]["age"] == pytest.approx(np.mean(ages), rel=0.02)
    assert stored["tasks"]["learnt"] == 2
    assert summary(run)["tasks"][-1] == ["e"]


def test_a_run_that_is_not_finished_does_not_grow(tmp_path: Path) -> None:
    run = start(tmp_path)
    path = tmp_path / "growing.yaml"
    content = yaml.safe_load(path.read_text())
    shutil.rmtree(run)
    content["rounds"] = {"quorum": 3, "join_timeout": 0.1, "max_skipped": 1}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(PerennialError):
        invoke("run", path, "--runs", tmp_path / "runs")
    more = ["data.classes=[a, b, c, d, e]", "tasks.count=3"]
    images(tmp_path / "images", "e", 30)
    if (run / "checkpoint" / "latest.safetensors").exists():
        with pytest.raises(StateError, match="has not finished the tasks that it began with"):
            invoke("run", "--resume", run, *[part for key in more for part in ("--set", key)])
