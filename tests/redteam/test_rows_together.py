"""A server whose model magnifies the last bits that a processor changes when one row more lies in a batch."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from perennial.learning.batches import TrainingSet, compute_outputs, split_batches
from perennial.models.sparsity import zero_shares
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise
from perennial.privacy.sample_level import BLOCK, PrivateGradient, split_blocks
from perennial.protocol.messages import EvaluateRequest, SparsityRequest, TrainRequest
from perennial.protocol.tensors import Tensors
from tests.redteam.attacked_hospital import TABLE, Hospital
from tests.redteam.test_free_answers import CLUSTERS, SAMPLE, hospital, stamp

WIDTH = 64
PRIVACY = PrivacyConfig(mode="sample", clip_norm=1.0, noise_multiplier=1.0, sample_rate=0.5)


def magnifying(place: Hospital, few: int, many: int) -> Tensors:
    """A model whose one unit speaks in a batch of `few` rows, or in one of `many`, and not in the other.

    The first layer says 1 whatever comes in. Class 0 is the answer where the unit speaks, else class 1.
    """
    torch.manual_seed(1)
    one, best = torch.ones(many, WIDTH), (0.0, torch.zeros(WIDTH))
    for _ in range(50):
        weight = torch.randn(WIDTH, WIDTH) * 3
        gap = nn.functional.linear(one[:few], weight)[-1] - nn.functional.linear(one, weight)[0]
        unit = int(gap.abs().argmax())
        if (size := float(gap[unit].abs())) > best[0]:
            best = (size, weight[unit] * torch.sign(gap[unit]))
    arrays = {name: tensor.zero_() for name, tensor in place.arrays().items()}
    weights = [name for name in arrays if name.startswith("backbone") and name.endswith("weight")]
    biases = [name for name in arrays if name.startswith("backbone") and name.endswith("bias")]
    arrays[biases[0]][:] = 1.0
    arrays[weights[1]][:] = best[1]
    arrays[biases[1]][:] = -nn.functional.linear(one, arrays[weights[1]])[0, 0]
    arrays[weights[2]][0, 0], arrays[biases[2]][1] = 1e12, 1.0
    (head,) = [name for name in arrays if name.startswith("head") and name.endswith("weight")]
    arrays[head][0, 0], arrays[head][1, 1] = 1.0, 100.0
    return Tensors(arrays)


def records(count: int) -> list[list[str]]:
    return [[f"{place / 7:.4f}", f"{place / 5:.4f}", "ill"] for place in range(count)]


def update(place: Hospital, model: Tensors, seen: list[Tensor]) -> Tensor:
    reply: Any = place.ask(TrainRequest(**stamp(place), arrays=model))
    return torch.cat([tensor.flatten().double() for tensor in reply.update.values()])


def counts(place: Hospital, model: Tensors, seen: list[Tensor]) -> Tensor:
    reply: Any = place.ask(EvaluateRequest(**stamp(place, round=2), arrays=model))
    wrong = [total - right for right, total in zip(reply.correct, reply.total, strict=True)]
    return torch.tensor([*reply.correct, *wrong], dtype=torch.float64)


def vector(place: Hospital, model: Tensors, seen: list[Tensor]) -> Tensor:
    assert place.ask(SparsityRequest(**stamp(place), arrays=model)) is not None, place.refusal
    return seen[-1] / len(seen[-1]) ** 0.5


TRAINED: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [WIDTH, WIDTH, 4], "norm": "none"},
    "learner": {"preset": "none", "optimizer": {"lr": 1.0}, "batch_size": 1, "epochs": 1},
    "privacy": SAMPLE | {"sample_rate": 1.0},
}
HELD_OUT = TABLE | {"test_fraction": 0.999999, "validation_fraction": 1e-7}


@pytest.mark.parametrize("few", [1, 2, 3, 35, 66])
@pytest.mark.parametrize(
    ("release", "changes"),
    [
        (update, {}),
        (counts, {"data": HELD_OUT, "evaluation": {"federated": True, "noise_multiplier": 4.0}}),
        (vector, {"strategy": CLUSTERS | {"layers": 2, "combine": "last"}}),
    ],
)
def test_one_record_moves_a_release_by_its_own_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: Any, changes: dict[str, Any], few: int
) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr("perennial.privacy.sample_level.add_noise", lambda *_: None)
    monkeypatch.setattr(
        "perennial.privacy.noised_counts.draw_discrete_gaussian", lambda n, *_: np.zeros(n, dtype=np.int64)
    )
    monkeypatch.setattr(
        "perennial.strategies.clustered_personalisation.site.add_noise",
        lambda sums, *_: seen.append(sums.clone()),
    )
    found, model = [], None
    for count in (few, few + 1):
        place = hospital(tmp_path / str(count), records(count), floor=1, **TRAINED | changes)
        model = model or magnifying(place, few, few + 1)
        found.append(release(place, model, seen))
    assert (found[0] - found[1]).norm() <= 1.0 + 1e-5


class Odd(nn.Module):
    """Layers of widths at which a row's last bits follow its place in a batch, too; all of them are told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (5, 17, 64, 8, 5, 10)
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in itertools.pairwise(widths)])
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        told = []
        for layer in self.layers:
            x = self.relu(layer(x))
            told.append(x)
        return torch.cat(told, dim=1)


def test_no_bit_of_a_row_follows_the_rows_beside_it() -> None:
    """One row fewer, and it is the first one: all others lie elsewhere, at every remainder of a block."""
    model, draw = Odd(), torch.Generator().manual_seed(1)
    x, y = torch.randn(2 * BLOCK + 3, 5, generator=draw), torch.zeros(2 * BLOCK + 3, dtype=torch.int64)
    constants = torch.zeros(5), torch.ones(5)

    def losses_of(data: TrainingSet) -> Any:
        return lambda rows: nn.functional.cross_entropy(model(data.x[rows]), data.y[rows], reduction="none")

    def found(rows: slice) -> tuple[Tensor, ...]:
        data = TrainingSet(x[rows], y[rows], *constants, alone=True)
        with PrivateGradient(model.train(), PRIVACY, 1.0, Noise()) as private:
            norms = private.measure_clipped_norms(data.places, losses_of(data))
        zeros = torch.stack(zero_shares(model.eval(), split_batches(data), 5)[4:]) * len(data)
        return compute_outputs(model, data), norms, zeros.round()

    for size in range(2, len(x) + 1):
        (values, norms, zeros), (others, norms_of_others, fewer) = found(slice(size)), found(slice(1, size))
        assert torch.equal(values[1:], others) and torch.equal(norms[1:], norms_of_others), size
        assert (zeros - fewer).abs().max() <= 1, size


def test_each_sample_lies_in_one_block_at_its_own_place() -> None:
    places = torch.randint(1 << 32, (300,), generator=torch.Generator().manual_seed(0))
    blocks = split_blocks(places)
    assert blocks.shape[1] == BLOCK and sorted(blocks[blocks >= 0].tolist()) == list(range(300))
    for block in blocks:
        there = (block >= 0).nonzero()[:, 0]
        assert torch.equal(places[block[there]] % BLOCK, there)
    assert split_blocks(places[:0]).shape == (0, BLOCK)
