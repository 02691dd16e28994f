"""Several images of one case as one record: what is read, counted, protected, judged and predicted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydantic import ValidationError

from perennial import load_run
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import forget_simulated, simulated_federation
from perennial.data.config import DataConfig
from perennial.data.sources import load
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError, DataError
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from tests.federations import resolved

SIZE = (12, 16)
MAP: dict[str, Any] = {
    "name": "patches",
    "filters": 8,
    "size": 4,
    "grid": 2,
    "image_size": list(SIZE),
    "tiles": 4,
}
PATIENTS = 60
COUNTS = np.random.default_rng(0).integers(1, 7, PATIENTS)


def paint(root: Path, patients: int = PATIENTS, first: int = 0) -> Path:
    """Images of two sizes, one to six of each patient: striped to the middle, or throughout."""
    generator = np.random.default_rng(first)
    for patient in range(first, first + patients):
        kind = "ab"[patient % 2]
        (root / kind).mkdir(parents=True, exist_ok=True)
        for number in range(COUNTS[patient % PATIENTS]):
            pixels = generator.integers(1, 120, (24 + 4 * (number % 2), 32, 3))
            pixels[:, : 16 + 16 * (patient % 2) : 2] += 60
            Image.fromarray(pixels.astype(np.uint8)).save(root / kind / f"P{patient:03d}_{number}.png")
    return root


def experiment(root: Path, *, data: dict[str, Any] | None = None, **more: Any) -> Path:
    content: dict[str, Any] = {
        "name": "cases",
        "data": {
            "source": "folder",
            "path": str(root),
            "patient": r"^(P\d+)_",
            "pool": "case",
            "sites": 2,
            "partition": {"kind": "iid"},
            **(data or {}),
        },
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": [MAP]},
        "strategy": {"name": "analytic", "head": "gaussian"},
        "evaluation": {"federated": False},
    } | more
    path = root.parent / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    forget_simulated()
    return path


def test_a_case_is_one_record_with_all_of_its_images(tmp_path: Path) -> None:
    loaded = load_experiment(experiment(paint(tmp_path / "images")))
    assert loaded.data.size == SIZE and loaded.data.pool is not None and loaded.data.pool.images == 4
    source = load(loaded.data, 0)
    assert source.train.x.shape == (PATIENTS, 3, 2 * SIZE[0], 2 * SIZE[1])
    assert source.train.keys is not None and source.train.keys[0] == "a/P000_0.png"
    many = int((COUNTS > 4).sum())
    assert f"{many} cases have more than 4 images; 4 of each count" in " ".join(source.notes)
    # the places of the first case with two images: these, and black
    case = next(row for row, key in enumerate(source.train.keys) if COUNTS[int(key[3:6])] == 2)
    record = source.train.x[case]
    for place, file in enumerate(sorted((tmp_path / "images").rglob(f"{source.train.keys[case][2:6]}*"))):
        with Image.open(file) as image:
            pixels = np.asarray(image.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)).transpose(
                2, 0, 1
            )
        left = place * SIZE[1]
        assert np.array_equal(record[:, : SIZE[0], left : left + SIZE[1]].numpy(), pixels)
    assert not record[:, SIZE[0] :].any()


def test_features_of_a_case_are_the_mean_over_its_images(tmp_path: Path) -> None:
    loaded = load_experiment(experiment(paint(tmp_path / "images")))
    x = load(loaded.data, 0).train.x.float()
    constants = torch.full((3,), 0.5), torch.full((3,), 0.25)
    tiled = build_fixed_features(loaded.model.maps, tuple(x.shape[1:]), constants).maps[0]
    alone = [each.model_copy(update={"tiles": 1}) for each in loaded.model.maps]
    plain = build_fixed_features(alone, (3, *SIZE), constants).maps[0]
    for row in range(8):
        parts = [x[row, :, t : t + SIZE[0], s : s + SIZE[1]] for t in (0, SIZE[0]) for s in (0, SIZE[1])]
        held = [part for part in parts if part.any()]
        expected = plain(torch.stack(held)).mean(dim=0)
        assert len(held) in range(1, 5) and torch.allclose(tiled(x[row : row + 1])[0], expected, atol=1e-6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on cases."""
    root = tmp_path_factory.mktemp("cases")
    path = experiment(paint(root / "images"))
    settings = RunSettings(str(path), runs=str(root / "runs"), device="cpu")
    run_in_process(settings)
    return settings.folder(settings.load())


def test_a_run_counts_and_judges_cases(finished: Path) -> None:
    run = load_run(finished)
    federation = simulated_federation(run.experiment)
    trained = sum(len(site.train) for site in federation.sites.values())
    test = federation.test
    assert test is not None and len(test.test) + trained < PATIENTS
    assert run.summary["analytic"]["samples"] == trained
    assert run.summary["final_accuracy"] > 0.8
    # what is written down reads the same: the size is of one image
    assert run.experiment.data.size == SIZE
    assert resolved(federation, run.experiment.data).size == SIZE


def test_a_model_of_cases_predicts_a_folder_of_images(finished: Path, tmp_path: Path) -> None:
    model = load_run(finished).model
    paint(tmp_path / "new", 8, first=1000)
    folders, kinds = [], []
    for patient in range(1000, 1008):
        files = sorted((tmp_path / "new").rglob(f"P{patient}_*"))
        kinds.append(files[0].parent.name)
        folders.append(tmp_path / f"case-{patient}")
        folders[-1].mkdir()
        for file in files:
            (folders[-1] / file.name).write_bytes(file.read_bytes())
    found = model.predict(folders)
    assert [each.name for each in found] == [str(folder) for folder in folders]
    assert sum(each.label == kind for each, kind in zip(found, kinds, strict=True)) >= 6
    assert len(model.predict([next(folders[0].iterdir())])) == 1


def test_noise_on_sums_hides_a_patient_with_all_images(tmp_path: Path) -> None:
    """Without a patient the sums move by one record's features, of length 1/sqrt 2 at most."""
    loaded = load_experiment(experiment(paint(tmp_path / "images")))
    source = load(loaded.data, 0)
    constants = torch.full((3,), 0.5), torch.full((3,), 0.25)
    shape = tuple(source.train.x.shape[1:])
    backbone: FixedFeatures = build_fixed_features(loaded.model.maps, shape, constants)
    features = backbone((source.train.x.float() / 255 - 0.5) / 0.25).double()
    largest = int(COUNTS.argmax())
    for file in (tmp_path / "images").rglob(f"P{largest:03d}_*"):
        file.unlink()
    without = load(loaded.data, 0).train.x
    rest = backbone((without.float() / 255 - 0.5) / 0.25).double()
    assert len(rest) == PATIENTS - 1
    assert float((features.sum(dim=0) - rest.sum(dim=0)).norm()) <= 0.5**0.5 + 1e-9
    noised = {"mode": "sample", "release": "sums", "noise_multiplier": 0.3, "delta": 1e-5}
    path = experiment(tmp_path / "images", privacy=noised, data={"validation_fraction": 0})
    summary: Any = run_in_process(RunSettings(str(path), name="n", runs=str(tmp_path / "r"), device="cpu"))
    assert summary["final_accuracy"] is not None


def test_cases_of_two_classes_are_refused(tmp_path: Path) -> None:
    root = paint(tmp_path / "images")
    Image.new("RGB", (32, 24)).save(root / "b" / "P000_9.png")
    with pytest.raises(
        DataError, match=r"one case \(a/P000_0.png\) with the classes 'a', 'b'; a case has one"
    ):
        load(load_experiment(experiment(root)).data, 0)


def test_what_cannot_be_pooled_is_refused_by_name(tmp_path: Path) -> None:
    root = paint(tmp_path / "images", 4)
    with pytest.raises(ConfigError, match="pool: case needs patient"):
        load_experiment(experiment(root, data={"patient": None}))
    with pytest.raises(ConfigError, match=r"every map needs the same `tiles`.*found 1, 4"):
        load_experiment(experiment(root, model={"name": "features", "features": [MAP, {"name": "inputs"}]}))
    with pytest.raises(ConfigError, match=r"every map needs the same `tiles`.*found no map"):
        load_experiment(experiment(root, model={"name": "small_cnn"}, strategy="fedavg"))
    with pytest.raises(ConfigError, match=r"found 4"):
        load_experiment(experiment(root, data={"pool": {"images": 9}}))
    with pytest.raises(ValidationError, match="pool belongs to source folder or npz or pack"):
        DataConfig.model_validate({"source": "csv", "path": "t.csv", "patient": "p", "pool": "case"})
    np.savez(tmp_path / "t.npz", x=np.zeros((6, 3), dtype=np.float32), y=np.arange(6) % 2, whose=np.arange(6))
    keys = {"source": "npz", "path": str(tmp_path / "t.npz"), "patient": "whose", "pool": {"images": 2}}
    with pytest.raises(DataError, match="no 8-bit images"):
        load(DataConfig.model_validate(keys), 0)
