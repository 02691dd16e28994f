"""The quick scores by which settings are chosen are those of the heads that runs have."""

import pytest
import torch

from benchmarks.analytic_choice import gaussian_scores, judged, ridge_scores, solved_scores
from perennial.learning.analytic.solve import Sums, gaussian, ridge
from perennial.models.feature_maps.ball import CONSTANT

CLASSES = 3


def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.tensor([0] * 12 + [1] * 5 + [2] * 3)
    x = torch.randn(20, 40, generator=generator, dtype=torch.float64) + y[:, None]
    return x, y, torch.randn(9, 40, generator=generator, dtype=torch.float64)


def sums(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Sums:
    phi = torch.cat([x, torch.full((len(x), 1), CONSTANT, dtype=torch.float64)], dim=1)
    rows = torch.zeros(CLASSES, phi.shape[1], dtype=torch.float64).index_add_(0, y, weight[:, None] * phi)
    counts = torch.zeros(CLASSES, dtype=torch.float64).index_add_(0, y, weight)
    return Sums(phi.T @ (weight[:, None] * phi), rows, counts, samples=len(x))


@pytest.mark.parametrize("shrinkage", [0.01, 0.5, 4.0])
@pytest.mark.parametrize("balanced", [True, False])
def test_ridge_by_samples_is_ridge_by_features(balanced: bool, shrinkage: float) -> None:
    x, y, wanted = samples()
    weight = 1 / torch.bincount(y).double()[y] if balanced else torch.ones(20, dtype=torch.float64)
    expected = ridge(sums(x, y, weight), shrinkage, standardise=True).scores(wanted)
    found = ridge_scores(x, y, wanted, CLASSES, balanced=balanced, shrinkages=[shrinkage])[shrinkage]
    assert torch.allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("shrinkage", [0.05, 0.5, 0.9])
def test_the_gaussian_by_samples_is_the_gaussian_by_features(shrinkage: float) -> None:
    x, y, wanted = samples()
    expected = gaussian(sums(x, y, torch.ones(20, dtype=torch.float64)), shrinkage).scores(wanted)
    found = gaussian_scores(x, y, wanted, CLASSES, [shrinkage])[shrinkage]
    assert torch.allclose(found, expected, atol=1e-8)


def test_solutions_by_features_are_those_by_samples() -> None:
    x, y, wanted = samples()
    found = solved_scores("gaussian", x, y, wanted, CLASSES, [0.5])[0.5]
    assert torch.allclose(found, gaussian_scores(x, y, wanted, CLASSES, [0.5])[0.5], atol=1e-8)
    found = solved_scores("balanced_ridge", x, y, wanted, CLASSES, [0.5])[0.5]
    expected = ridge_scores(x, y, wanted, CLASSES, balanced=True, shrinkages=[0.5])[0.5]
    assert torch.allclose(found, expected, atol=1e-9)


def test_classes_count_alike_in_balanced_accuracy() -> None:
    scores = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 1])
    held = torch.tensor([True, True])
    assert judged({0.5: scores}, labels, held) == {"0.5": (0.5, 0.75)}
    assert judged({0.5: scores}, labels, ~held | torch.tensor([False, True])) == {"0.5": (0.5, 0.25)}
