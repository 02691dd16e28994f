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
from perennial.engine.growth import Changes

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
        "learner": {"preset": "none", "optimizer": {"lr": 0.05}, "epochs": 2, **learner},
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


def closed_form(folder: Path, **strategy: Any) -> Path:
    """A run of two sites that exist, in closed form: A with classes a and b, B with b and c."""
    for site, classes in (("A", "ab"), ("B", "bc")):
        images(folder / "images" / site, classes, 25, first=0 if site == "A" else 100)
    data = {"source": "folder", "path": str(folder / "images"), "color": "gray"}
    data |= {"partition": {"kind": "natural"}, "validation_fraction": 0.2}
    content = {
        **{"name": "growing", "data": data, "tasks": {"count": 1, "rounds": 1}},
        "model": {"name": "features", "features": [{"name": "random", "width": 40}]},
        "strategy": {"name": "analytic", **strategy},
    }
    path = folder / "growing.yaml"
    path.write_text(yaml.safe_dump(content))
    invoke("run", path, "--runs", folder / "runs")
    return folder / "runs" / "growing"


def test_each_change_of_records_is_named_and_closed_form_adds_and_subtracts_these(tmp_path: Path) -> None:
    run, site = closed_form(tmp_path), tmp_path / "images" / "B"
    told = invoke("check", "--resume", run)
    assert "there is no new class and no new record" in told
    before = summary(run)
    kept = run / "statistics" / "A-task-0001.safetensors"
    written = kept.stat().st_mtime_ns
    images(site, "c", 6, first=200)
    (site / "b" / "100.png").rename(site / "c" / "corrected.png")
    (site / "b" / "101.png").rename(site / "b" / "moved.png")
    (site / "b" / "102.png").unlink()
    shutil.copy(site / "b" / "103.png", site / "b" / "twice.png")
    told = invoke("check", "--resume", run)
    for words in (
        "6 records of known classes are new: B/c/200.png (c)",
        "1 records of known classes are known with another class: B/c/corrected.png (b, now c)",
        "1 records of known classes are known from another place: B/b/moved.png (b)",
        "1 records of known classes are there no more: one of b",
        "1 records of known classes are there more than once: B/b/twice.png (b)",
        "sums of 1 sites (B) change, and they alone are asked again",
    ):
        assert words in told, told
    assert summary(run) == before, "check changes nothing"
    assert "sums of 1 sites (B) change" in invoke("run", "--resume", run)
    after = summary(run)
    assert kept.stat().st_mtime_ns == written, "A was asked for nothing"
    invoke("run", tmp_path / "growing.yaml", "--runs", tmp_path / "anew")
    anew = summary(tmp_path / "anew" / "growing")
    assert after["analytic"]["sums_sha256"] == anew["analytic"]["sums_sha256"]
    assert after["analytic"]["sums_sha256"] != before["analytic"]["sums_sha256"]
    assert after["model_sha256"] == anew["model_sha256"]
    assert after["accuracy_matrix"] == anew["accuracy_matrix"]
    assert "there is no new class and no new record" not in invoke("check", "--resume", run), "twice is said"
    assert "sums of" not in invoke("run", "--resume", run)


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


def test_nothing_is_new_where_no_record_was_noted() -> None:
    """As of a benchmark's data, which sites do not note."""
    assert not [*Changes(new=["row 1 (7)"]).in_words()]
    assert [*Changes(learnt=True, new=["row 1 (7)"]).in_words()]
