"""Runs of one process see the data of their own file, as it is when they begin."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

CONTENT: dict[str, Any] = {
    "name": "one",
    "seed": 1,
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "features", "features": ["inputs"]},
    "strategy": {"name": "analytic", "head": "gaussian"},
    "evaluation": {"federated": False},
}


def table(path: Path, classes: str, apart: float) -> Path:
    """A table of three columns and two classes, so far apart."""
    rng = np.random.default_rng(0)
    rows = [
        ",".join([*(f"{value:.3f}" for value in rng.normal(size=3) + apart * (row % 2)), classes[row % 2]])
        for row in range(300)
    ]
    path.write_text("\n".join(["a,b,c,label", *rows]) + "\n")
    return path


def accuracy(folder: Path, data: dict[str, Any], workers: int = 1) -> float:
    """Of a run with the same name and settings, whatever the data."""
    folder.mkdir()
    (folder / "e.yaml").write_text(yaml.safe_dump(CONTENT | {"data": data | {"sites": 3}}))
    found = run_in_process(RunSettings(str(folder / "e.yaml"), runs=str(folder / "runs")), workers)
    matrix: Any = found["accuracy_matrix"]
    return matrix[-1][-1]


@pytest.mark.parametrize("workers", [1, 2])
def test_two_tables_with_the_same_settings_are_two(tmp_path: Path, workers: int) -> None:
    def of(name: str, classes: str, apart: float) -> float:
        path = table(tmp_path / f"{name}.csv", classes, apart)
        return accuracy(
            tmp_path / name, {"source": "csv", "path": str(path), "label_column": "label"}, workers
        )

    assert of("apart", "xy", 5.0) == 1.0
    assert of("alike", "xy", 0.0) < 0.8
    assert of("others", "pq", 5.0) == 1.0


def test_images_that_came_to_a_folder_are_seen(tmp_path: Path) -> None:
    root = tmp_path / "images"

    def add(label: str, level: int, first: int) -> None:
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + 30):
            pixels = np.random.default_rng(number).integers(level, level + 50, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{number}.png")

    data = {"source": "folder", "path": str(root)}
    add("dark", 0, 0)
    add("light", 200, 100)
    assert accuracy(tmp_path / "before", data) == 1.0
    # dark images of the light class, more than there are light ones
    add("light", 0, 200)
    add("light", 0, 300)
    assert accuracy(tmp_path / "after", data) < 1.0
