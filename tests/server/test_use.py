"""A finished model is used: folders, all probabilities, prediction sets, ONNX, outside data, a model card."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from perennial import load_run
from perennial.cli.main import app
from perennial.data.images import ImageReading, read_images
from perennial.foundation.errors import DataError, PerennialError
from perennial.learning.batches import to_float
from perennial.learning.evaluation_tables import TEMPERATURES
from perennial.models.prediction import NONE_OF_THE_KNOWN
from perennial.models.saved import load_saved
from perennial.server.measures.record import read_measures
from perennial.server.report.card import write_card

LEARNER = {"preset": "none", "epochs": 8, "batch_size": 16, "optimizer": {"lr": 0.05}}


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def shades(folder: Path, per_class: int, seed: int) -> Path:
    """Grey images in class folders; the class is the brightness, blurred by noise."""
    generator = np.random.default_rng(seed)
    for label, name in enumerate(("dark", "middle", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            level = 60 + 65 * label + generator.normal(0, 22, (10, 12))
            image = Image.fromarray(level.clip(0, 255).astype(np.uint8))
            image.save(folder / name / f"p{index // 3}-{index}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shades")
    shades(folder / "train", 60, seed=1)
    shades(folder / "outside", 20, seed=2)
    data = {
        "source": "folder",
        "path": str(folder / "train"),
        "image_size": 8,
        "color": "gray",
        "sites": 2,
        "calibration_fraction": 0.3,
    }
    experiment = {
        "name": "shades",
        "data": data,
        "tasks": {"count": 1, "rounds": 3},
        "model": {"name": "small_cnn"},
        "learner": LEARNER,
        "evaluation": {"coverage": 0.8},
    }
    (folder / "shades.yaml").write_text(yaml.safe_dump(experiment))
    invoke("run", folder / "shades.yaml", "--runs", folder / "runs")
    return folder


def find_evaluation(run: Path, data: str) -> Path:
    """The folder of the only evaluation with data of this name."""
    (found,) = (run / "evaluations").glob(f"{data}-????????")
    return found


def test_a_folder_gives_every_probability_and_set_as_csv_and_json(images: Path) -> None:
    run, outside = images / "runs" / "shades", images / "outside"
    invoke("predict", run, outside, "--output", images / "found.csv")
    with open(images / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60 and rows[0]["name"].startswith(str(outside / "dark"))
    names = load_saved(run / "model.safetensors").classes
    shares = np.array([[float(row[f"probability of {name}"]) for name in names] for row in rows])
    assert shares.sum(axis=1) == pytest.approx(1, abs=1e-4)
    assert [row["class"] for row in rows] == [names[index] for index in shares.argmax(axis=1)]
    lines = [json.loads(line) for line in invoke("predict", run, outside, "--format", "jsonl").splitlines()]
    assert [line["class"] for line in lines] == [row["class"] for row in rows]
    words = ["; ".join(line["prediction_set"]) or NONE_OF_THE_KNOWN for line in lines]
    assert words == [row["prediction set"] for row in rows]
    found = load_run(run).model.predict([outside])
    assert [each.members for each in found] == [tuple(line["prediction_set"]) for line in lines]
    assert found[0].probabilities == pytest.approx(lines[0]["probabilities"])


def test_what_cannot_be_predicted_is_named_and_leaves_no_file(images: Path) -> None:
    run, empty = images / "runs" / "shades", images / "empty"
    empty.mkdir()
    for path, words in ((empty, "no image in this folder"), (images / "nowhere", "no such file or folder")):
        with pytest.raises(DataError, match=words):
            invoke("predict", run, path, "--output", images / "none.csv")
    with pytest.raises(PerennialError, match="allowed text, csv, jsonl"):
        invoke("predict", run, images / "outside", "--format", "xml")
    assert not list(images.glob("*none*"))


def test_an_onnx_file_has_everything_inside(images: Path) -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    run = images / "runs" / "shades"
    for name in ("one", "two"):
        invoke("export", run, "--output", images / name, "--onnx")
    assert (images / "one" / "model.onnx").read_bytes() == (images / "two" / "model.onnx").read_bytes()
    session = runtime.InferenceSession(images / "one" / "model.onnx", providers=["CPUExecutionProvider"])
    paths = sorted((images / "outside").rglob("*.png"))
    saved = load_saved(run / "model.safetensors")
    x = read_images(paths, ImageReading((8, 8), "gray")).x
    probabilities, index = session.run(None, {"samples": x})
    own = load_run(run).model.probabilities(torch.from_numpy(x)).numpy()
    assert np.abs(probabilities - own).max() < 1e-5
    assert np.array_equal(index, own.argmax(axis=1))
    facts = json.loads((images / "one" / "model.json").read_text())
    assert "Resampling.BILINEAR" in facts["resizing"] and "8 rows by 8 columns" in facts["resizing"]
    model = onnx.load(images / "one" / "model.onnx")
    inside = {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key in facts}
    assert inside["classes"] == list(saved.classes) and inside["resizing"] == facts["resizing"]
    assert inside["confidence"] == json.loads(json.dumps(saved.confidence.to_json()))
    assert len(inside["confidence"]["thresholds"]) == 3


def test_outside_data_are_judged_with_the_same_measures(images: Path) -> None:
    run, outside = images / "runs" / "shades", images / "outside"
    invoke("evaluate", run, outside, "--set", r"patient=^(p\d+)-")
    folder = find_evaluation(run, "outside")
    found = read_measures(folder)
    assert found is not None and found.source == "external" and found.samples == 60
    assert found.interval == "patients"
    saved = load_saved(run / "model.safetensors")
    paths = [sorted((outside / name).glob("*.png")) for name in saved.classes]
    for label, own in enumerate(paths):
        x = torch.from_numpy(read_images(own, ImageReading((8, 8), "gray")).x)
        with torch.no_grad():
            logits = saved.classifier(to_float(x, saved.inputs.mean, saved.inputs.std))
        called = logits.argmax(dim=1).bincount(minlength=3).tolist()
        assert found.confusion[label] == called
    assert found.calibration.temperature == saved.confidence.temperature
    assert found.calibration.temperature in TEMPERATURES
    assert found.prediction_sets is not None
    covered = found.prediction_sets.thresholds["dark"].covered.value
    sets = [p.members or () for p in load_run(run).model.predict([outside / "dark"])]
    assert covered == pytest.approx(np.mean(["dark" in members for members in sets]))
    assert "external validation" in (folder / "report.html").read_text()


def test_data_that_the_model_learnt_from_are_not_taken_for_outside_data(images: Path) -> None:
    run = images / "runs" / "shades"
    for data, own in ((images / "train", True), (images / "outside", False)):
        invoke("evaluate", run, data)
        found = read_measures(find_evaluation(run, data.name))
        assert found is not None and ("left out, which a model has learnt from" in found.headline[0]) == own
        assert found.samples == (35 if own else 60)
    notes = (run / "sites").rename(run / "away")
    invoke("evaluate", run, images / "train")
    notes.rename(run / "sites")
    found = read_measures(find_evaluation(run, "train"))
    assert found is not None and "data of the run itself" in found.headline[0] and found.samples == 180


def test_a_card_tells_of_evaluations_outside_and_denies_none(images: Path) -> None:
    run = images / "runs" / "shades"
    done = run / "evaluations"
    for folder in done.glob("*/measures.json"):
        folder.unlink()
    invoke("card", run)
    assert "It was not judged on data from outside" in (run / "card.md").read_text()
    invoke("evaluate", run, images / "outside")
    invoke("card", run)
    text = (run / "card.md").read_text()
    assert "It was not judged" not in text
    assert "## Judged outside the federation" in text
    assert f"| {find_evaluation(run, 'outside').name} | 60 |" in text


def test_a_card_tells_a_sites_own_model_and_other_data_of_one_name_apart(images: Path) -> None:
    run, twin = images / "runs" / "copy", images / "twin" / "outside"
    shutil.copytree(images / "runs" / "shades", run, ignore=shutil.ignore_patterns("evaluations"))
    shutil.copytree(images / "outside", twin)
    next(twin.glob("dark/*.png")).unlink()
    own = run / "sites" / "site-0" / "personal_model.safetensors"
    with safe_open(run / "model.safetensors", framework="pt") as file:
        # answers the first class always
        nothing = {key: file.get_tensor(key) * 0 for key in file.keys()}  # noqa: SIM118
        save_file(nothing, own, file.metadata())
    for data in (images / "outside", twin):
        invoke("evaluate", run, data)
    more = "--site", "site-0", "--against", run, "--margin", "0.4"
    done = CliRunner().invoke(app, [*map(str, ("evaluate", run, images / "outside", *more))])
    assert done.exit_code == 1, done.output
    invoke("card", run)
    text = (run / "card.md").read_text()
    assert " of site site-0 against the approved " in text
    rows = [line for line in text.splitlines() if line.startswith("| outside-")]
    assert sorted(row.split(" | ")[1] for row in rows) == ["59", "60"], "each of the run's own model"
    (of_site,) = (run / "evaluations").glob("outside-site-0-*")
    assert "model shades, site site-0" in (of_site / "report.html").read_text()


@pytest.mark.parametrize("evaluation", [{"measures": False}, {"federated": False}, {"noise_multiplier": 2.0}])
def test_a_card_names_no_tables_that_nobody_asked_for(
    images: Path, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, object]
) -> None:
    run = images / "runs" / "shades"
    saved = load_saved(run / "model.safetensors")
    asked = saved.settings["evaluation"] | evaluation
    changed = replace(saved, settings={**saved.settings, "evaluation": asked})
    monkeypatch.setattr("perennial.server.report.card.load_saved", lambda path: changed)
    text = write_card(run).read_text()
    assert "exact tables" not in text
    assert ("counts of right answers" in text) == bool(asked["federated"])


def test_a_name_from_another_institution_means_nothing_in_a_card(images: Path, tmp_path: Path) -> None:
    run, name = tmp_path / "run", "![dark](http://e.v)"
    shutil.copytree(images / "runs" / "shades", run)
    (run / "evaluations" / "_a_").mkdir(parents=True)
    judged = json.loads((run / "measures.json").read_text())
    judged["model_file_sha256"] = json.loads((run / "summary.json").read_text())["model_file_sha256"]
    (run / "evaluations" / "_a_" / "measures.json").write_text(json.dumps(judged))
    verdict = {"text": f"FAILED: class {name}: +0.1 points [-1.0, +1.2] of 9"}
    (run / "evaluations" / "_a_" / "gate.jsonl").write_text(json.dumps(verdict))
    for path in [run / "measures.json", run / "summary.json"]:
        path.write_text(path.read_text().replace('"dark"', f'"{name}"').replace('"site-0"', f'"{name}"'))
    lines = write_card(run).read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "dark" in line]
    assert len(rows) == 3 and all(row.startswith(r"| !\[dark\](http://e.v) | ") for row in rows)
    assert any(line.startswith(r"| \_a\_ | ") for line in lines)
    assert r"- FAILED: class ![dark\](http://e.v): +0.1 points [-1.0, +1.2] of 9" in lines
    assert re.search(r"\| \d+ % \[\d+, \d+\] \|", rows[1]), "figures stay as they are"


def test_a_card_says_what_the_model_is_and_is_not(images: Path) -> None:
    run = images / "runs" / "shades"
    invoke("card", run)
    text = (run / "card.md").read_text()
    for words in (
        "# shades: model card",
        "grey images of 8 x 8 pixels into 3 classes",
        "Nobody has stated what this model is for",
        "| site-0 |",
        "Prediction sets with coverage 80 %",
        "each site sends updates of the model, computed from its training samples",
        "with counts of right answers and exact tables of held-out, validation and calibration samples (",
        "in each of 512 steps). No noise covers this; epsilon is infinite.",
        "A server that breaks the protocol can recover single images",
        "It knows the classes above and no other",
        json.loads((run / "summary.json").read_text())["model_file_sha256"],
    ):
        assert words in text
    (images / "use.md").write_text("For triage of *shades*.")
    invoke("card", run, "--intended-use", images / "use.md")
    assert "For triage of *shades*." in (run / "card.md").read_text()
