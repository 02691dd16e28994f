"""Large images in tiles: averages by hand, tiles that are black, and the size at which files are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.tiling import grid_of, places
from perennial.models.feature_maps.config import PatchesConfig
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.feature_maps.patches import Tiled
from tests.models.test_feature_maps import images

CONSTANTS = torch.full((3,), 0.5), torch.full((3,), 0.25)


class Sides(nn.Module):
    """The mean of an image's first channel, and how large the image is."""

    width, about = 3, "sides"

    def forward(self, pixels: Tensor) -> Tensor:
        size = torch.tensor(pixels.shape[2:], dtype=pixels.dtype).expand(len(pixels), 2)
        return torch.cat([pixels[:, 0].mean(dim=(1, 2))[:, None], size], dim=1)


def patches(**keys: Any) -> PatchesConfig:
    return PatchesConfig.model_validate({"name": "patches", "filters": 5, "size": 3, "grid": 2} | keys)


def built(shape: tuple[int, int, int], **keys: Any) -> FixedFeatures:
    return build_fixed_features([patches(**keys)], shape, CONSTANTS)


@pytest.mark.parametrize("count", range(1, 17))
def test_a_grid_has_as_many_tiles_as_asked_for_and_covers_the_image(count: int) -> None:
    rows, columns = grid_of(count)
    assert rows * columns == count and rows <= columns
    for length in (16, 17, 31, 100):
        part, starts = places(length, columns)
        seen = {pixel for start in starts for pixel in range(start, start + part)}
        assert seen == set(range(length)) and len(starts) == columns


def test_features_are_the_mean_over_the_tiles() -> None:
    image = torch.arange(1.0, 25.0).view(1, 1, 4, 6)
    found = Tiled(Sides(), 6)(image)
    assert found.tolist() == [[12.5, 2.0, 2.0]]
    # five rows of pixels: two rows of tiles of three, which share one
    taller = torch.cat([image, torch.full((1, 1, 1, 6), 100.0)], dim=2)
    parts = [taller[0, 0, top : top + 3, left : left + 2].mean() for top in (0, 2) for left in (0, 2, 4)]
    assert float(Tiled(Sides(), 6)(taller)[0, 0]) == pytest.approx(float(torch.stack(parts).mean()))


def test_a_map_in_tiles_is_the_map_of_each_tile() -> None:
    x = images(3, side=16).float()
    tiled, plain = built((3, 16, 16), tiles=4).maps[0], built((3, 8, 8)).maps[0]
    parts = [plain(x[:, :, top : top + 8, left : left + 8]) for top in (0, 8) for left in (0, 8)]
    assert torch.allclose(tiled(x), torch.stack(parts).mean(dim=0), atol=1e-6)
    assert built((3, 16, 16), tiles=4).content != built((3, 16, 16)).content
    assert "tiles" not in patches().model_dump() and patches(tiles=4).model_dump()["tiles"] == 4


# an experiment on a folder of large images


def folder(root: Path) -> Path:
    """Grey photographs of several sizes whose classes differ in stripes that 8 pixels cannot show."""
    generator = np.random.default_rng(0)
    for index in range(40):
        kind = "ab"[index % 2]
        height, width = 64 + 4 * (index % 3), 96
        shifted = np.arange(width) + generator.integers(8)
        stripes = 60 * ((shifted // (2 if kind == "a" else 4)) % 2)
        pixels = (stripes + generator.integers(60, 100, (height, width))).astype(np.uint8)
        place = root / "photographs" / kind
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{index:02d}.png")
    return root / "photographs"


def experiment(root: Path, maps: list[dict[str, Any]], **data: Any) -> Path:
    content = {
        "name": "photographs",
        "data": {"source": "folder", "path": str(folder(root)), "sites": 2, "color": "gray", **data},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": maps},
        "strategy": {"name": "analytic", "head": "gaussian"},
        "evaluation": {"federated": False},
    }
    path = root / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


MAP = {"name": "patches", "filters": 10, "size": 6, "grid": 1, "image_size": [32, 48]}


def test_an_experiment_on_large_images_in_tiles_runs_and_tells_what_small_ones_hide(tmp_path: Path) -> None:
    def accuracy(name: str, keys: dict[str, Any], **data: Any) -> float:
        path = experiment(tmp_path, [MAP | keys], **data)
        settings = RunSettings(str(path), name=name, runs=str(tmp_path / "runs"), device="cpu")
        summary: Any = run_in_process(settings)
        return summary["final_accuracy"]

    tiled = {"image_size": [32, 48], "tiles": 4}
    assert load_experiment(experiment(tmp_path, [MAP | tiled])).data.size == (64, 96)
    assert accuracy("tiles", tiled) == 1.0
    assert accuracy("shrunk", tiled, image_size=[8, 12]) < 1.0
