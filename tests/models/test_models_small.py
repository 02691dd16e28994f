"""The small convolutional network takes images of any size with a linear layer of bounded size."""

import pytest
import torch

from perennial.models.small import LARGEST_MAP, SmallCNN


@pytest.mark.parametrize(
    ("shape", "cells"),
    [
        ((1, 4, 4), (1, 1)),
        ((1, 28, 28), (7, 7)),
        ((3, 32, 32), (8, 8)),
        ((3, 63, 63), (15, 15)),  # the largest map that is not averaged
        ((3, 64, 64), (8, 8)),
        ((3, 96, 128), (6, 8)),
        ((3, 224, 224), (8, 8)),
        ((1, 100, 60), (9, 5)),
        ((1, 4, 400), (1, 9)),
    ],
)
def test_map_before_the_linear_layer(shape: tuple[int, int, int], cells: tuple[int, int]) -> None:
    network = SmallCNN(shape, (16, 32), 64, "group", False)
    assert network.fc.in_features == 32 * cells[0] * cells[1]
    assert max(cells) < 2 * LARGEST_MAP
    assert network(torch.rand(2, *shape)).shape == (2, 64)
