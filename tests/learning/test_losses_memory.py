"""Hand-computed losses and exemplar choices."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.client.exemplars import select_by_herding, select_nearest
from perennial.foundation.errors import ConfigError
from perennial.learning import losses
from perennial.learning.losses import (
    BalancedSoftmax,
    Batch,
    GradientCompensation,
    TaskTemperatures,
    compute_contrastive,
    log_prior,
)


@pytest.mark.parametrize(
    ("values", "budget", "by_herding", "by_nearest"),
    [
        ([0, 1, 2, 9], 3, [2, 1, 9], [2, 1, 0]),
        ([3, 8, 0, 2, 9], 2, [3, 8], [3, 2]),
        ([-4, -1, 1, 6], 3, [1, -1, 6], [1, -1, -4]),
        ([-10, 0.2, 10, 4.2], 3, [0.2, 4.2, -10], [0.2, 4.2, 10]),
    ],
)
def test_selection_by_hand(
    values: list[float], budget: int, by_herding: list[float], by_nearest: list[float]
) -> None:
    features = torch.tensor(values, dtype=torch.float64)[:, None]
    assert [values[i] for i in select_by_herding(features, budget)] == by_herding
    assert [values[i] for i in select_nearest(features, budget)] == by_nearest


def averaged(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of samples as the loss of a batch."""
    return lambda *arguments, **keywords: loss(*arguments, **keywords).mean()


relation_distillation = averaged(losses.compute_relation_distillation)


def balanced_softmax(logits: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    loss = BalancedSoftmax()
    loss.prior = prior
    return loss.mean(Batch(logits, labels, logits))


def gradient_compensation(logits: Tensor, labels: Tensor, first_class: int) -> Tensor:
    return GradientCompensation().mean(Batch(logits, labels, logits, first_class=first_class))


def test_balanced_softmax_by_hand() -> None:
    logits, label = torch.zeros(1, 2), torch.tensor([1])
    counts = torch.tensor([9, 1])
    assert float(balanced_softmax(logits, label, log_prior(counts, 1.0, 1))) == pytest.approx(
        2.302585, abs=1e-6
    )
    assert float(balanced_softmax(logits, label, log_prior(counts, 1.0, -1))) == pytest.approx(
        0.105361, abs=1e-6
    )
    with pytest.raises(ConfigError, match="sign"):
        log_prior(torch.tensor([3, 0]), 1.0, -1)


def test_contrastive_by_hand_and_in_batches_without_pairs() -> None:
    features = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]], requires_grad=True)
    value = compute_contrastive(features, torch.tensor([0, 0, 1, 1]), 1.0)
    assert float(value) == pytest.approx(-math.log(math.e / (math.e + 2)), abs=1e-6)
    for form in ("out", "in"):
        for rows in (1, 4):
            part = features[:rows].detach().requires_grad_()
            loss = compute_contrastive(part, torch.arange(rows), 1.0, form)
            loss.backward()
            assert float(loss) == 0
            assert part.grad is not None and bool(torch.isfinite(part.grad).all())


def test_a_sample_counts_by_its_gradient_among_its_kind() -> None:
    # probabilities of the own class: 1/2 and 1/4 among the old, 1/5 alone among the new
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.4, 0.4, 0.2]]).log().requires_grad_()
    loss = gradient_compensation(logits, torch.tensor([0, 1, 2]), first_class=2)
    expected = (math.log(2) * 0.5 / 0.625 + math.log(4) * 0.75 / 0.625 + math.log(5)) / 3
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) == pytest.approx(-0.5 * 0.5 / 0.625 / 3, abs=1e-6)


def test_relations_of_classes_by_hand() -> None:
    old_logits = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    # an old sample's target is the old answer; a new one's is half the old answer, half its own class
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.45, 0.05, 0.5]])
    labels = torch.tensor([0, 2])
    logits = torch.zeros(2, 3)
    expected = (targets * (targets.clamp(min=1e-30).log() + math.log(3))).sum() / 2
    assert float(relation_distillation(logits, labels, old_logits, 1.0)) == pytest.approx(float(expected))
    agreeing = targets.clamp(min=1e-30).log()
    assert float(relation_distillation(agreeing, labels, old_logits, 1.0)) == pytest.approx(0.0, abs=1e-6)


def test_task_temperatures_weigh_old_and_new_alike_however_many_there_are() -> None:
    logits, labels = (
        torch.randn(7, 4, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0, 1, 2, 2, 3, 3, 3]),
    )
    loss = TaskTemperatures()
    values = loss(Batch(logits, labels, logits, first_class=2))
    scaled = logits / torch.tensor([0.9, 0.9, 1.1, 1.1])
    old, new = F.cross_entropy(scaled[:2], labels[:2]), F.cross_entropy(scaled[2:], labels[2:])
    assert float(values.mean()) == pytest.approx(float(1.1 * old + 0.9 * new), abs=1e-6)
    # all samples of one kind: the other adds nothing, and not NaN
    alone = loss(Batch(logits[:2], labels[:2], logits[:2], first_class=2))
    assert float(alone.mean()) == pytest.approx(float(1.1 * old), abs=1e-6)
    first = loss(Batch(logits, labels, logits))
    assert torch.equal(first, F.cross_entropy(logits, labels, reduction="none"))
