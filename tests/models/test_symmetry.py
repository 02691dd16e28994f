"""Features averaged over symmetric images: the same for each, by hand, and refused where they do nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perennial.models.feature_maps.config import PatchesConfig, PretrainedConfig, Symmetry
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.feature_maps.patches import Symmetric
from tests.models.test_feature_maps import features_of, images
from tests.models.test_pretrained_backbone import weights  # noqa: F401

CONSTANTS = torch.full((3,), 0.5), torch.full((3,), 0.25)


class Corners(nn.Module):
    """The four corners of one channel."""

    width = 4
    about = "corners"

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels[:, 0][:, [0, 0, -1, -1], [0, -1, 0, -1]]


def patches_config(**keys: Any) -> PatchesConfig:
    return PatchesConfig.model_validate({"name": "patches", "filters": 5, "size": 3, "grid": 2} | keys)


def built(side: tuple[int, int] = (8, 8), **keys: Any) -> FixedFeatures:
    return build_fixed_features([patches_config(**keys)], (3, *side), CONSTANTS)


def turned(image: Tensor, symmetry: Symmetry) -> list[Tensor]:
    """Every symmetric image, found by repeating mirror images and, in a square, quarter turns."""
    moves: list[Callable[[Tensor], Tensor]] = [lambda x: x.flip(-1)]
    if symmetry == "rectangle":
        moves.append(lambda x: x.flip(-2))
    if symmetry == "square":
        moves.append(lambda x: x.rot90(1, (-2, -1)))
    found = [image]
    for known in found:
        for move in moves:
            if not any(torch.equal(move(known), other) for other in found):
                found.append(move(known))
    return found


@pytest.mark.parametrize(("symmetry", "count"), [("mirror", 2), ("rectangle", 4), ("square", 8)])
def test_symmetric_images_have_the_same_features(symmetry: Symmetry, count: int) -> None:
    group = turned(images(1, seed=3), symmetry)
    assert len(group) == count
    features = features_of(built(symmetry=symmetry), torch.cat(group))
    assert torch.allclose(features, features[:1].expand_as(features), atol=1e-4)
    plain = features_of(built(), torch.cat(group))
    assert not torch.allclose(plain[0], plain[1], atol=1e-3)


@pytest.mark.parametrize(
    ("symmetry", "expected"),
    [("mirror", [1.5, 1.5, 3.5, 3.5]), ("rectangle", [2.5, 2.5, 2.5, 2.5]), ("square", [2.5, 2.5, 2.5, 2.5])],
)
def test_features_are_averages_over_the_images(symmetry: Symmetry, expected: list[float]) -> None:
    image = torch.tensor([[[[1.0, 0, 2], [0, 9, 0], [3, 0, 4]]]])
    assert Symmetric(Corners(), symmetry)(image).tolist() == [expected]


def test_what_decides_features_decides_their_hash() -> None:
    contents = {built().content, built(symmetry="mirror").content, built(symmetry="square").content}
    contents |= {built(power=power).content for power in (0.5, 0.9)}
    assert len(contents) == 5
    assert built(power=1.0).content == built().content


def test_a_pretrained_network_sees_the_mirror_image_too(weights: dict[str, Any]) -> None:  # noqa: F811
    configs = [PretrainedConfig.model_validate(weights | keys) for keys in ({}, {"symmetry": "mirror"})]
    plain, symmetric = (build_fixed_features([config], (3, 32, 32), CONSTANTS) for config in configs)
    x = images(2, side=32).float()
    found = symmetric.maps[0](x)
    assert torch.allclose(found, (plain.maps[0](x) + plain.maps[0](x.flip(-1))) / 2, atol=1e-5)
    assert symmetric.content != plain.content
