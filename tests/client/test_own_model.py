"""A site's own model in use: `perennial predict` at the site, from what its state folder holds."""

import shutil
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from perennial.cli.main import app
from perennial.data.images import ImageReading, read_images
from perennial.learning.batches import to_float
from perennial.models.saved import load_saved
from tests.strategies.personal_runs import GROUPS, run


def predict(*arguments: object) -> list[tuple[str, str]]:
    """(class, confidence) of each line."""
    result = CliRunner().invoke(app, ["predict", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return [(fields[1], fields[2]) for fields in map(str.split, result.output.splitlines())]


def test_a_site_predicts_with_its_own_model_and_needs_nothing_else(tmp_path: Path) -> None:
    done = run(tmp_path / "run", strategy=GROUPS)
    paths = [tmp_path / f"{number}.png" for number in range(40)]
    rows, _ = load_digits(return_X_y=True)
    for path, pixels in zip(paths, rows.reshape(-1, 8, 8), strict=False):
        Image.fromarray((pixels * 15.9).astype("uint8")).save(path)
    everyone = predict(done.folder, *paths)
    at_sites = {site: predict(done.folder, "--site", site, *paths) for site in ("site-0", "site-1", "site-2")}
    for site, lines in at_sites.items():
        saved = load_saved(done.folder / "sites" / site / "personal_model.safetensors")
        images = torch.from_numpy(read_images(paths, ImageReading((8, 8), "gray")).x)
        confidence, label = (
            saved.model(to_float(images, saved.inputs.mean, saved.inputs.std)).softmax(dim=1).max(dim=1)
        )
        expected = [
            (saved.classes[index], f"{value:.4f}")
            for index, value in zip(label.tolist(), confidence.tolist(), strict=True)
        ]
        assert lines == expected
    assert len({tuple(lines) for lines in (everyone, *at_sites.values())}) == 4
    # a hospital has its state folder, and neither the run nor the server
    shutil.copytree(done.folder / "sites" / "site-1", tmp_path / "hospital")
    shutil.rmtree(tmp_path / "run")
    assert predict(tmp_path / "hospital", *paths) == at_sites["site-1"]
