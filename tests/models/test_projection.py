"""Public projections: nobody's records decide them, they whiten, and they are known by a hash."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.foundation.errors import ConfigError
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.feature_maps import projection
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.feature_maps.projection import draw_crops

PATCHES: dict[str, Any] = {"name": "patches", "filters": 12, "size": 4, "grid": 2}
SHAPE = (3, 16, 16)
CONSTANTS = torch.full((3,), 0.4), torch.full((3,), 0.2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(projection, "IMAGES", 60)


def config(**changes: Any) -> ModelConfig:
    content = {"name": "features", "features": [PATCHES], "projection": 8}
    return ModelConfig.model_validate(content | changes)


def built(shape: tuple[int, ...] = SHAPE, **changes: Any) -> FixedFeatures:
    model = build_model(config(**changes), shape, 2, 1, constants=CONSTANTS)
    assert isinstance(model.backbone, FixedFeatures)
    return model.backbone


def inputs_of(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels / 255 - CONSTANTS[0].view(3, 1, 1)) / CONSTANTS[1].view(3, 1, 1)


def test_components_whiten_the_public_images() -> None:
    """Before they are scaled to one length, the crops' components have mean 0 and differ little in spread."""
    backbone = built()
    crops = draw_crops(60, SHAPE, 0).float()
    mapped = backbone.map_inputs(inputs_of(crops))
    assert backbone.projection is not None
    projected = (mapped - backbone.projection.means[0]) @ backbone.projection.components[0]
    spread = projected.square().mean(dim=0)
    assert float(projected.mean(dim=0).abs().max()) < 0.02
    assert float(spread.max()) <= 1.0 and float(spread.min()) > 0.3
    among = projected.T @ projected / len(projected)
    assert float((among - among.diagonal().diag()).abs().max()) < 0.02


def test_the_same_experiment_has_the_same_projection_and_another_one_has_not(tmp_path: Path) -> None:
    one = built()
    kept = list((tmp_path / "cache" / "projections").iterdir())
    again = built()
    assert len(kept) == 1 and one.content == again.content
    kept[0].unlink()
    assert built().content == one.content, "computed anew it has the same bits"
    assert built(projection=7).content != one.content
    assert built(projection=None).content != one.content


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"projection": 60}, SHAPE, "allowed: up to 59"),
        ({"features": ["inputs"]}, (5,), "takes its components from public images"),
    ],
)
def test_what_cannot_be_projected_is_named(
    changes: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(shape, **changes)


def test_a_projection_of_an_earlier_release_is_its_width() -> None:
    former = {"width": 8, "images": 2000, "seed": 0}
    assert config(projection=former).projection == 8
    with pytest.raises(ValueError, match="allowed a width alone"):
        config(projection=former | {"seed": 1})
