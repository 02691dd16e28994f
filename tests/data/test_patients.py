"""Patients: whole in every part, at one site, among exemplars, and as the unit of a guarantee."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydantic import ValidationError
from torch import nn

from perennial.client.exemplars import share_by_hash
from perennial.config.run import RunSettings
from perennial.config.site import SitePolicy
from perennial.data.config import DataConfig
from perennial.data.federation import SimulatedFederation, build
from perennial.data.splits import group_by_text
from perennial.data.tasks_config import TasksConfig
from perennial.engine.run import run_in_process
from perennial.foundation.errors import DataError
from perennial.privacy.composition import compose
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.entries import Entry
from perennial.privacy.noise import Noise
from perennial.privacy.sample_level import PrivateGradient
from perennial.privacy.statement import describe

ONE_TASK = TasksConfig(count=1, rounds=1, order="natural")
PATIENTS = np.repeat(np.arange(60), np.random.default_rng(0).integers(1, 6, 60))


def arrays(folder: Path, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    count = len(PATIENTS)
    x, y = rng.integers(0, 256, (count, 4, 4), dtype=np.uint8), (PATIENTS + rng.integers(0, 2, count)) % 3
    np.savez(folder / "p.npz", x=x, y=y, whose=PATIENTS, site=np.array(["a", "b"])[PATIENTS % 2])
    return {"source": "npz", "path": str(folder / "p.npz"), "patient": "whose", **more}


def table(folder: Path, **more: Any) -> dict[str, Any]:
    rows = [f"{row},P{patient},{'abc'[patient % 3]}" for row, patient in enumerate(PATIENTS)]
    (folder / "p.csv").write_text("\n".join(["size,mrn,label", *rows]))
    return {"source": "csv", "path": str(folder / "p.csv"), "patient": "mrn", **more}


def folder(folder: Path, **more: Any) -> dict[str, Any]:
    for row, patient in enumerate(PATIENTS):
        place = folder / "images" / "abc"[patient % 3]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.full((2, 2, 3), row % 256, dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{row:04d}_P{patient}_left.png")
    return {"source": "folder", "path": str(folder / "images"), "patient": r"_(P\d+)_", **more}


def manifest(root: Path, **more: Any) -> dict[str, Any]:
    described = folder(root)
    files = sorted(Path(described["path"]).rglob("*.png"))
    lines = [f"{file.relative_to(root)},{file.parent.name},{file.name.split('_')[1]}" for file in files]
    (root / "m.csv").write_text("\n".join(["path,label,whose", *lines]))
    return {"source": "folder", "path": str(root / "m.csv"), "patient": "whose", **more}


def places(federation: SimulatedFederation) -> dict[int, set[tuple[str, str]]]:
    """Patient -> (site, part) of each sample."""
    site = next(iter(federation.sites.values()))
    numbers = site.keyed.number_groups(torch.arange(len(site.y))).tolist()
    found: dict[int, set[tuple[str, str]]] = {}
    for name, data in federation.sites.items():
        for part in ("train", "validation", "test"):
            for row in data.part(part).tolist():
                found.setdefault(numbers[row], set()).add((name, part))
    return found


@pytest.mark.parametrize("write", [arrays, table, folder, manifest])
@pytest.mark.parametrize(
    "block",
    [
        {"sites": 3},
        {"sites": 2, "partition": {"kind": "dirichlet", "alpha": 0.5, "min_samples": 0}},
        {"sites": 2, "samples_limit": 0.6, "validation_fraction": 0.4},
    ],
)
def test_a_patient_is_in_one_part_of_one_site(write: Any, block: dict[str, Any], tmp_path: Path) -> None:
    federation = build(DataConfig.model_validate(write(tmp_path, **block)), ONE_TASK, 2)
    found = places(federation)
    assert len(found) > 30
    assert all(len(where) == 1 for where in found.values())
    assert {part for where in found.values() for _, part in where} == {"train", "validation", "test"}


def test_exemplars_by_share_keep_patients_whole(tmp_path: Path) -> None:
    site = build(DataConfig.model_validate(arrays(tmp_path, sites=1)), ONE_TASK, 2).site("site-0")
    hashes = site.keyed.values("exemplars", site.train.numpy())
    kept = set(site.train[share_by_hash(hashes, site.y[site.train], 0.5)].tolist())
    for patient in np.unique(PATIENTS[site.train.numpy()]):
        rows = {row for row in site.train.tolist() if PATIENTS[row] == patient}
        assert rows <= kept or not rows & kept
    assert 0 < len(kept) < len(site.train)


def test_what_names_no_patient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"_left\.png: data\.patient '_\(Q"):
        build(DataConfig.model_validate(folder(tmp_path, sites=2) | {"patient": r"_(Q\d)_"}), ONE_TASK, 2)
    with pytest.raises(ValidationError, match="2 groups; allowed: one"):
        DataConfig.model_validate(folder(tmp_path) | {"patient": r"(a)(b)"})
    with pytest.raises(ValidationError, match="no regular expression"):
        DataConfig.model_validate(folder(tmp_path) | {"patient": "("})
    with pytest.raises(DataError, match="no array 'whos'.*did you mean 'whose'"):
        build(DataConfig.model_validate(arrays(tmp_path, sites=2) | {"patient": "whos"}), ONE_TASK, 2)
    block = table(tmp_path, sites=2)
    text = (tmp_path / "p.csv").read_text().replace("0,P0,", "0,,", 1)
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(DataError, match="line 2, mrn: the patient is empty"):
        build(DataConfig.model_validate(block), ONE_TASK, 2)
    with pytest.raises(ValidationError, match="patient belongs to source"):
        DataConfig.model_validate({"source": "digits", "patient": "x"})


def private(**more: Any) -> PrivacyConfig:
    block = {
        "mode": "sample",
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "sample_rate": 0.5,
        "unit": "patient",
    }
    return PrivacyConfig.model_validate(block | more)


@pytest.mark.parametrize("most", [4096, 2])
def test_a_patient_s_summed_gradient_is_clipped(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("perennial.privacy.sample_level.BLOCK", most)
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    # the gradient of each loss is its input: patient 0 has (3, 0) + (0, 4), patient 1 (0.3, 0), patient 2 inf
    x = torch.tensor([[3.0, 0.0], [0.3, 0.0], [0.0, 4.0], [math.inf, 0.0]])
    patients = torch.tensor([0, 1, 0, 2])
    config = private(noise_multiplier=0.0)
    with PrivateGradient(model, config, expected_batch=2.0, source=Noise()) as gradient:
        gradient.compute(torch.arange(4), lambda rows: model(x[rows])[:, 0], patients)
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.tensor([[(0.6 + 0.3) / 2, 0.8 / 2]]))


def test_a_guarantee_for_a_patient_is_one_for_each_sample_and_not_for_the_site() -> None:
    entry = Entry.of_update(private(), run="r", experiment="e", recipient="server", sample_rate=0.5, steps=2)
    assert (entry.unit, entry.relation) == ("patient", "add_remove")
    direct = compose([entry], 1e-5, "rdp", "patient")
    assert math.isfinite(direct.epsilon) and direct.unit == "patient"
    of_sample = compose([entry], 1e-5, "rdp", "sample")
    assert direct.epsilon < of_sample.epsilon < math.inf
    assert compose([entry], 1e-5, "rdp", "site").epsilon == math.inf
    single = Entry.of_update(
        private(unit=None), run="r", experiment="e", recipient="server", sample_rate=0.5, steps=2
    )
    assert compose([entry, single], 1e-5, "rdp", "patient").epsilon == math.inf
    assert compose([entry, single], 1e-5, "rdp").unit == "sample"
    said = describe(private(), [entry])
    assert said.unit.startswith("one patient") and "several sites" in " ".join(said.not_covered)


def test_false_combinations_are_refused() -> None:
    with pytest.raises(ValidationError, match="choose one"):
        private(bayesian=True)
    with pytest.raises(ValidationError, match="belong to mode sample"):
        PrivacyConfig.model_validate(
            {"mode": "client_local", "clip_norm": 1.0, "noise_multiplier": 1.0, "unit": "patient"}
        )
    assert SitePolicy(require_privacy="patient", max_epsilon=3.0).unit == "patient"


def scans(root: Path) -> Path:
    """DICOM files of 30 patients, two each, in two class folders; the names say nothing of whose they are."""
    from tests.data.test_hospital_images import write_dicom

    for index in range(60):
        pixels = np.full((4, 4), index, np.uint8)
        patient = f"HOSP-{index % 30:04d}"
        write_dicom(root / "ab"[index % 2] / f"IM{index:04d}", pixels, PatientID=patient)
    return root


def test_the_patient_of_dicom_files_is_read_from_them_and_kept_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scans(tmp_path / "scans")
    tasks = TasksConfig(count=1, rounds=1)
    block = {"source": "folder", "path": str(path), "patient": "PatientID", "sites": 2}
    federation = build(DataConfig.model_validate(block), tasks, 1)
    whose = {(value, pixel % 30) for value, pixel in _parts_by_pixel(federation)}
    # each patient is in one part of one site
    assert len(whose) == 30 and {patient for _, patient in whose} == set(range(30))
    experiment = tmp_path / "e.yaml"
    content = {"name": "ct", "data": block, "model": {"name": "mlp"}, "tasks": {"count": 1, "rounds": 1}}
    experiment.write_text(yaml.safe_dump(content))
    with caplog.at_level(logging.DEBUG):
        run_in_process(RunSettings(str(experiment), runs=str(tmp_path / "runs")))
    told = caplog.text + "".join(capsys.readouterr())
    kept = b"".join(file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file())
    unkeyed = [group_by_text("patient", [f"HOSP-{index:04d}"])[0].tobytes() for index in range(30)]
    assert "HOSP-" not in told and b"HOSP-" not in kept
    assert not any(value in kept or value.hex().encode() in kept for value in unkeyed)


def _parts_by_pixel(federation: SimulatedFederation) -> list[tuple[tuple[str, str], int]]:
    parts = ("train", "validation", "test")
    return [
        ((site.name, part), int(pixel))
        for site in federation.sites.values()
        for part in parts
        for pixel in site.x[site.part(part), 0, 0, 0]
    ]


def test_a_dicom_file_without_a_patient_is_named_and_other_files_too(tmp_path: Path) -> None:
    from tests.data.test_hospital_images import write_dicom

    path = scans(tmp_path / "scans")
    block = {"source": "folder", "path": str(path), "patient": "PatientID", "sites": 2}
    write_dicom(path / "a" / "IM9999", np.full((4, 4), 1, np.uint8), PatientID="  ")
    with pytest.raises(DataError, match=r"IM9999: data\.patient: PatientID: the file has none"):
        build(DataConfig.model_validate(block), ONE_TASK, 1)
    (path / "a" / "IM9999").unlink()
    Image.new("L", (4, 4)).save(path / "a" / "photo.png")
    with pytest.raises(DataError, match=r"photo\.png: data\.patient: PatientID is an element of DICOM"):
        build(DataConfig.model_validate(block), ONE_TASK, 1)
