"""A finished model is used: on images, on rows of a table, on arrays; and what cannot be used is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.foundation.errors import DataError
from perennial.models.saved import load_saved

COMMON = {
    "tasks": {"count": 1, "rounds": 3},
    "learner": {"preset": "none", "epochs": 12, "batch_size": 16, "optimizer": {"lr": 0.05}},
}


def trained(folder: Path, data: dict[str, Any], model: dict[str, Any]) -> Path:
    """The run folder of a small experiment over data."""
    experiment = {"name": "small", "seed": 1, "data": data, "model": model, **COMMON}
    (folder / "small.yaml").write_text(yaml.safe_dump(experiment))
    done = CliRunner().invoke(app, ["run", str(folder / "small.yaml"), "--runs", str(folder / "runs")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return folder / "runs" / "small"


def lines(*arguments: object) -> list[list[str]]:
    """The fields of what `perennial predict` prints."""
    done = CliRunner().invoke(app, ["predict", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of patients whose column `mark` nearly tells the class, with missing values, and its run."""
    folder = tmp_path_factory.mktemp("table")
    generator = np.random.default_rng(3)
    rows = ["ward,mark,group,label"]
    for index in range(160):
        label = index % 4
        mark = "" if index % 37 == 0 else f"{label * 5 + generator.normal():.3f}"
        rows.append(f"ward-{index % 2},{mark},{'ab'[label % 2]},kind-{label}")
    (folder / "patients.csv").write_text("\n".join(rows))
    data = {
        "source": "csv",
        "path": str(folder / "patients.csv"),
        "site_column": "ward",
        "partition": {"kind": "natural"},
    }
    trained(folder, data, {"name": "mlp", "hidden": [16]})
    return folder


def test_rows_of_a_table_in_another_order_of_columns_without_labels(table: Path) -> None:
    new = table / "new.csv"
    new.write_text("group;ignored;mark\nb;x;15.2\nb;y;14.8\nb;z;NA\n")
    found = lines(table / "runs" / "small", new)
    assert [name for name, _, _ in found] == [f"{new}:2", f"{new}:3", f"{new}:4"]
    assert [label for _, label, _ in found[:2]] == ["kind-3", "kind-3"]
    assert all(0.25 <= float(confidence) <= 1 for _, _, confidence in found)


def test_rows_are_read_as_the_training_rows_were(table: Path) -> None:
    saved = load_saved(table / "runs" / "small" / "model.safetensors")
    assert saved.inputs.columns == {"mark": "numeric", "group": ["a", "b"]}
    found = lines(table / "runs" / "small", table / "patients.csv")
    truth = [row.rsplit(",", 1)[1] for row in (table / "patients.csv").read_text().splitlines()[1:]]
    agree = np.mean([label == true for (_, label, _), true in zip(found, truth, strict=True)])
    assert agree > 0.9, "columns or constants are not those of training"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mark\n1\n", "no column 'group'; this model takes mark, group"),
        ("mark,group\nhigh,a\n", "column 'mark', line 2: 'high' is not a number"),
        ("", "the table has no row"),
    ],
)
def test_a_table_that_does_not_fit_is_named(table: Path, text: str, said: str) -> None:
    path = table / "odd.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=said) as error:
        lines(table / "runs" / "small", path)
    assert str(path) in str(error.value)


def test_images_and_arrays_of_images(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    for label, level in enumerate((40, 90, 160, 220)):
        (tmp_path / "data" / f"shade-{label}").mkdir(parents=True)
        for index in range(12):
            pixels = np.clip(generator.normal(level, 6, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / f"shade-{label}" / f"{index}.png")
    data = {"source": "folder", "path": str(tmp_path / "data"), "image_size": 8, "color": "gray", "sites": 2}
    run = trained(tmp_path, data, {"name": "small_cnn"})
    images = sorted((tmp_path / "data" / "shade-3").glob("*.png"))
    found = lines(run, *images)
    assert [Path(name) for name, _, _ in found] == images
    np.savez(tmp_path / "a.npz", x=np.stack([np.asarray(Image.open(path)) for path in images]))
    same = lines(run, tmp_path / "a.npz")
    assert [name for name, _, _ in same][:2] == [f"{tmp_path / 'a.npz'}[0]", f"{tmp_path / 'a.npz'}[1]"]
    assert [fields[1:] for fields in same] == [fields[1:] for fields in found]
    (tmp_path / "broken.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"broken\.png"):
        lines(run, tmp_path / "broken.png")
    np.savez(tmp_path / "scaled.npz", x=np.zeros((3, 1, 8, 8), dtype=np.float32))
    with pytest.raises(DataError, match=r"scaled\.npz: x becomes float32; this model takes uint8"):
        lines(run, tmp_path / "scaled.npz")
