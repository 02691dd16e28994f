"""What `perennial init` asks, and what it must not decide alone."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from perennial.cli.init import init_command
from perennial.data.config import DataConfig
from perennial.data.sources import load
from perennial.data.survey import TwoLevels


def paint(root: Path, *folders: str, count: int = 3) -> None:
    """Images of noise in folders."""
    generator = np.random.default_rng(0)
    for name in folders:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")


def test_sites_that_hold_different_classes_are_not_taken_for_classes(tmp_path: Path) -> None:
    data = tmp_path / "skin"
    paint(data, "A/mel", "A/nv", "A/bcc", "B/nv")
    with pytest.raises(TwoLevels, match="A/ holds bcc, mel, nv; B/ holds nv.*--layout site/class"):
        init_command(data, tmp_path / "none", "")
    assert not (tmp_path / "none").exists()
    init_command(data, tmp_path / "sites", "", layout="site/class")
    block = yaml.safe_load((tmp_path / "sites" / "experiment.yaml").read_text())["data"]
    assert block["partition"] == {"kind": "natural"}
    assert load(DataConfig.model_validate(block), 0).classes == ("bcc", "mel", "nv")
    said = init_command(data, tmp_path / "classes", "", layout="class")
    assert any("folders inside A, B name nothing here" in line for line in said)
    block = yaml.safe_load((tmp_path / "classes" / "experiment.yaml").read_text())["data"]
    found = load(DataConfig.model_validate(block), 0)
    assert found.classes == ("A", "B")
    assert any("images in folders inside A, B are of that class" in note for note in found.notes)


def test_a_person_is_asked_and_the_answer_counts(tmp_path: Path) -> None:
    data, asked = tmp_path / "skin", list[str]()
    paint(data, "A/mel", "A/nv", "B/bcc")

    def ask(question: str, allowed: object) -> str:
        asked.append(question)
        return "site/class"

    init_command(data, tmp_path, "", ask=ask)
    assert len(asked) == 1 and "what are the first folders?" in asked[0]
    assert "natural" in (tmp_path / "experiment.yaml").read_text()


def test_a_tidy_folder_is_not_asked_about(tmp_path: Path) -> None:
    def ask(question: str, allowed: object) -> str:
        raise AssertionError(question)

    paint(tmp_path / "flat", "mel", "nv")
    init_command(tmp_path / "flat", tmp_path / "a", "", ask=ask)
    paint(tmp_path / "parts", "train/mel", "train/nv", "test/mel", "test/nv")
    init_command(tmp_path / "parts", tmp_path / "b", "", ask=ask)
    paint(tmp_path / "sites", *(f"{site}/{name}" for site in "AB" for name in ("mel", "nv")))
    init_command(tmp_path / "sites", tmp_path / "c", "", ask=ask)
    paint(tmp_path / "all", *(f"{site}/{part}/mel" for site in "AB" for part in ("train", "test")))
    paint(tmp_path / "all", *(f"{site}/{part}/nv" for site in "AB" for part in ("train", "test")))
    said = init_command(tmp_path / "all", tmp_path / "d", "", ask=ask)
    assert "24 samples of 2 classes at 2 sites: mel 12, nv 12" in said[0]
