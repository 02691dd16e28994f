"""Sparsity vectors by hand: what they count, what they refuse, and what noise they get."""

import math

import pytest
import torch
from torch import Tensor, nn

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ConfigError, DataError, ProtocolError
from perennial.models.sparsity import SparsityPlan, count_common_channels, zero_shares
from perennial.privacy.accountants import compute_sparsity_l2_sensitivity, solve_gaussian_multiplier
from perennial.protocol.messages import SparsityReply
from perennial.protocol.tensors import Tensors
from perennial.strategies.clustered_personalisation.grouping import check_vector

STAMP = {
    "run": "0" * 16,
    "experiment": "e" * 64,
    "class_order": "c" * 64,
    "task": 1,
    "round": 2,
    "num_classes": 2,
}
EXPERIMENT = {
    "name": "vectors",
    "data": {"source": "digits"},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}
RELU = nn.Sequential(nn.ReLU())


def batches(*inputs: Tensor) -> list[tuple[Tensor, slice, slice]]:
    return [(each, slice(None), slice(None)) for each in inputs]


def vector(model: nn.Module, x: Tensor, plan: SparsityPlan) -> Tensor:
    return plan.vector(zero_shares(model, batches(*x.split(3)), plan.layers))


def test_silent_active_and_checkered_channels() -> None:
    x = torch.ones(2, 3, 4, 4)
    x[:, 0] = -1.0
    x[:, 2, ::2, ::2] = -1.0
    x[:, 2, 1::2, 1::2] = 0.0
    assert vector(RELU, x, SparsityPlan((0, 1, 2), 1)).tolist() == [1.0, 0.0, 0.5]
    assert vector(RELU, x, SparsityPlan((2, 0), 1)).tolist() == [0.5, 1.0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU()).eval()


def test_calls_are_counted_and_not_modules() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            # the second operation overwrites what the hook has seen
            return self.relu(self.relu(x).sub_(1.0))

    first, second = zero_shares(Twice(), batches(torch.tensor([[0.5, 2.0, -1.0]])), 2)
    assert first.tolist() == [0.0, 0.0, 1.0]
    assert second.tolist() == [1.0, 0.0, 1.0]


def test_what_has_no_vector_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers: found 2.*calls 1 ReLU"):
        zero_shares(RELU, batches(torch.ones(1, 2)), 2)
    with pytest.raises(ConfigError, match="calls 0 ReLU"):
        zero_shares(nn.Sequential(nn.GELU()), batches(torch.ones(1, 2)), 1)
    with pytest.raises(DataError, match="without samples"):
        zero_shares(RELU, batches(), 1)
    # whether a record makes it so must not show
    assert zero_shares(RELU, batches(torch.tensor([[math.nan]])), 1)[0].tolist() == [0.0]
    with pytest.raises(ConfigError, match="0 to 3 are allowed"):
        SparsityPlan((4,), 2).vector([torch.zeros(4), torch.zeros(6)])
    assert count_common_channels(network(), torch.zeros(1, 1, 8, 8), 2, "average") == 4
    assert count_common_channels(network(), torch.zeros(1, 1, 8, 8), 2, "last") == 6


def test_vectors_that_cannot_be_true_are_refused() -> None:
    plan = SparsityPlan((0, 1), 1)
    fingerprint = plan.fingerprint("model")

    def reply(values: Tensor, extractor: str = fingerprint) -> SparsityReply:
        return SparsityReply(**STAMP, extractor=extractor, vector=Tensors(sparsity=values))

    check_vector(reply(torch.tensor([0.0, 1.0])), plan, fingerprint)
    with pytest.raises(ProtocolError, match=r"values from -0.1 to 0.5"):
        check_vector(reply(torch.tensor([0.5, -0.1])), plan, fingerprint)
    with pytest.raises(ProtocolError, match="expected sparsity"):
        check_vector(reply(torch.zeros(3)), plan, fingerprint)
    stale = SparsityPlan((0, 2), 1).fingerprint("model")
    for other in (stale, plan.fingerprint("another model")):
        with pytest.raises(ProtocolError, match="another model or other channels"):
            check_vector(reply(torch.zeros(2), other), plan, fingerprint)
    with pytest.raises(ProtocolError, match="NaN"):
        SparsityReply.from_record(reply(torch.tensor([0.5, math.nan])).to_record())


def test_the_noise_hides_one_sample_and_their_number() -> None:
    """A vector and a 1 for each sample: one more, less or other moves their sum by sqrt(C + 1) at most."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.rand(40, 32, generator=draw).round(), torch.ones(40, 1)], dim=1)
    moved = [(rows.sum(0) - rows[1:].sum(0)).norm(), (rows[1:].sum(0) - rows[:-1].sum(0)).norm(), 33**0.5]
    assert max(float(m) for m in moved[:2]) <= compute_sparsity_l2_sensitivity(32) == moved[2]
    experiment = Experiment.model_validate(EXPERIMENT)
    mechanism = charges.price_sparsity(experiment, "r", 1.0).within(compute_sparsity_l2_sensitivity(32))
    assert mechanism.std == pytest.approx(math.sqrt(33) * solve_gaussian_multiplier(1.0, 1e-5))
    assert mechanism.entry.relation == "add_remove"
