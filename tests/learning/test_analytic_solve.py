"""Heads in closed form, against cases that were worked out by hand and against direct formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.learning.analytic.solve import NEVER, Sums, compute_gcv, solve, solve_gaussian, solve_ridge

FOUR = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.5]], dtype=torch.float64)
FIVE = torch.cat([FOUR, torch.tensor([[0.5, 0.25]], dtype=torch.float64)])
A, B = 0, 1
POINT = torch.tensor([[1.0, 0.2]], dtype=torch.float64)


def sums_of(x: Tensor, labels: list[int], weights: Tensor | None = None, classes: int = 2) -> Sums:
    y = torch.nn.functional.one_hot(torch.tensor(labels), classes).double()
    phi = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    w = torch.ones(len(x), dtype=torch.float64) if weights is None else weights
    return Sums(
        (phi * w[:, None]).T @ phi,
        (y * w[:, None]).T @ phi,
        (y * w[:, None]).sum(dim=0),
        constant=1.0,
        samples=len(x),
    )


def close(found: Tensor, expected: Any, tolerance: float = 1e-6) -> bool:
    return torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=tolerance)


def test_ridge_of_the_hand_case() -> None:
    sums = sums_of(FOUR, [A, B, A, B])
    head = solve_ridge(sums, 0.1 / (float(sums.gram.trace()) / 3))  # 0.1 on the diagonal
    assert close(head.weight, [[0.906194, -0.024941], [-0.845227, 0.115006]])
    assert close(head.bias, [0.060967, 0.829985])
    assert close(head.scores(POINT)[0], [0.962173, 0.007759])


def test_balanced_ridge_of_the_hand_case() -> None:
    labels = [A, B, A, B, A]
    weights = 1 / torch.bincount(torch.tensor(labels)).double()[labels]
    head = solve_ridge(sums_of(FIVE, labels, weights), 0.1)
    assert close(head.weight, [[0.783601, -0.146422], [-0.669153, 0.314399]])
    assert close(head.bias, [0.243762, 0.560573])


def test_gaussian_of_the_hand_case() -> None:
    head = solve_gaussian(sums_of(FIVE, [A, B, A, B, A]), 0.5)
    assert close(head.weight, [[14.761905, 0.952381], [-0.857143, 3.428571]])
    assert close(head.bias, [-6.349206, -1.285714])
    assert close(head.scores(POINT)[0], [8.603175, -1.457143])


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_gcv_is_the_direct_formula(standardise: bool, balanced: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64) * torch.arange(1, 7) + 2
    labels = torch.randint(0, 3, (40,), generator=generator)
    w = 1 / torch.bincount(labels).double()[labels] if balanced else torch.ones(40, dtype=torch.float64)
    sums = sums_of(x, labels.tolist(), w, 3)
    design = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], dim=1)
    penalty = torch.eye(7, dtype=torch.float64)
    mean = (w @ x) / w.sum()
    if standardise:
        deviation = ((w @ (x - mean).square()) / w.sum()).sqrt()
        design = torch.cat([(x - mean) / deviation, torch.ones(40, 1, dtype=torch.float64)], dim=1)
        penalty[-1, -1] = 0  # the bias is not shrunk
        unit = float(w.sum())
    else:
        unit = float(sums.gram.trace()) / 7
    y = torch.nn.functional.one_hot(labels, 3).double()
    for shrinkage in (0.003, 0.1, 2.0):
        normal = design.T @ (w[:, None] * design) + shrinkage * unit * penalty
        hat = design @ torch.linalg.solve(normal, design.T * w)
        rss = float((w[:, None] * (y - hat @ y).square()).sum())
        direct = rss / 40 / (1 - float(hat.trace()) / 40) ** 2
        assert compute_gcv(sums, [shrinkage], standardise)[0] == pytest.approx(direct, rel=1e-11)


def test_standardised_ridge_does_not_depend_on_the_features_scale() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = [A, B, A] * 10
    scale = torch.tensor([1.0, 10.0, 0.1, 3.0], dtype=torch.float64)
    head, scaled = (solve_ridge(sums_of(x * s, labels), 0.1, standardise=True) for s in (1, scale))
    assert torch.allclose(head.scores(x), scaled.scores(x * scale), atol=1e-12)
    assert not torch.allclose(solve_ridge(sums_of(x, labels), 0.1).scores(x), head.scores(x), atol=1e-3)


@pytest.mark.parametrize("classifier", [solve_ridge, solve_gaussian])
def test_a_class_without_samples_is_never_predicted(classifier) -> None:
    head = classifier(sums_of(FIVE, [0, 2, 0, 2, 0], classes=3), 0.5)
    assert head.bias[1] == NEVER
    tensors = head.list_tensors()
    logits = FIVE.float() @ tensors["head.weight"].T + tensors["head.bias"]
    assert set(logits.argmax(dim=1).tolist()) == {0, 2}


def test_a_feature_that_does_not_vary_is_left_out() -> None:
    constant = torch.cat([FIVE, torch.full((5, 1), 0.3, dtype=torch.float64)], dim=1)
    labels = [A, B, A, B, A]
    assert torch.allclose(
        solve_gaussian(sums_of(constant, labels), 0.0).weight[:, 2], torch.zeros(2).double()
    )
    head = solve_ridge(sums_of(constant, labels), 0.1, standardise=True)
    assert torch.allclose(head.weight[:, 2], torch.zeros(2).double())


def test_no_spread_within_a_class_is_refused() -> None:
    with pytest.raises(DataError, match="allowed more samples than classes"):
        solve_gaussian(sums_of(FIVE[:2], [A, B]), 0.5)


def test_a_singular_matrix_is_refused_and_a_bad_condition_refined() -> None:
    with pytest.raises(DataError, match="singular"):
        solve(torch.zeros(3, 3, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64))
    hilbert = 1.0 / (torch.arange(8.0)[:, None] + torch.arange(8.0) + 1).double()
    truth = torch.ones(8, 1, dtype=torch.float64)
    right = hilbert @ truth
    assert float((hilbert @ solve(hilbert, right) - right).abs().max()) < 1e-14
