"""Random crops and flips against a plain loop, and the step from bytes to floats."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.data.config import AugmentationConfig
from perennial.learning.batches import augment


def candidates(image: torch.Tensor, config: AugmentationConfig) -> list[torch.Tensor]:
    """Everything that may become of one image (C, H, W)."""
    p, (height, width) = config.crop_padding, image.shape[1:]
    padded = F.pad(image, (p, p, p, p))
    crops = [
        padded[:, row : row + height, column : column + width]
        for row in range(2 * p + 1)
        for column in range(2 * p + 1)
    ]
    return crops + ([crop.flip(2) for crop in crops] if config.flip else [])


@settings(deadline=None, max_examples=30)
@given(
    padding=st.integers(0, 3),
    flip=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
)
def test_each_image_is_one_of_its_crops_and_mirrors(
    padding: int, flip: bool, seed: int, dtype: torch.dtype
) -> None:
    config = AugmentationConfig(crop_padding=padding, flip=flip)
    x = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (6, 2, 4, 5))).to(dtype)
    found = augment(x, config, np.random.default_rng(seed))
    assert found.shape == x.shape and found.dtype == x.dtype
    for image, changed in zip(x, found, strict=True):
        assert any(torch.equal(changed, candidate) for candidate in candidates(image, config))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_choices_are_even_and_repeat_with_the_seed(kind: str) -> None:
    def generator() -> np.random.Generator | torch.Generator:
        return np.random.default_rng(3) if kind == "numpy" else torch.Generator().manual_seed(3)

    config = AugmentationConfig(crop_padding=1, flip=True)
    x = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).expand(9000, 1, 3, 3)
    found = augment(x, config, generator())
    assert torch.equal(found, augment(x, config, generator()))
    outcomes, counts = found.flatten(1).unique(dim=0, return_counts=True)
    assert len(outcomes) == 18
    assert counts.min() > 400 and counts.max() < 600
