"""Exact sums in fewer bytes: the receiver has the same integers, and a liar's tensors are refused."""

import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from perennial.foundation.errors import ProtocolError
from perennial.learning.analytic.compact import compact_statistics, read_compact
from perennial.learning.analytic.statistics import Collector, Statistics, SumsForm, weighted
from perennial.models.feature_maps.ball import on_grid

CLASSES = range(3)


def rows_of(samples: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.relu(torch.randn(samples, width, generator=generator))
    return on_grid(features), torch.arange(samples) % len(CLASSES)


def sums_of(features: Tensor, labels: Tensor) -> Statistics:
    collector = Collector(features.shape[1], CLASSES)
    collector.add(features, labels)
    return collector.finish()


def sent_and_read(sums: Statistics) -> tuple[dict[str, Tensor], Statistics]:
    sent = compact_statistics(sums)
    back = read_compact(sent, SumsForm(sums.width), sums.classes)
    return sent, Statistics(back["gram"], back["sums"], back["counts"], sums.classes)


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("samples", "width", "form"),
    [(0, 30, "factor"), (1, 30, "factor"), (20, 200, "factor"), (150, 200, "planes"), (400, 60, "planes")],
)
def test_the_receiver_has_the_same_integers(samples: int, width: int, form: str) -> None:
    sums = sums_of(*rows_of(samples, width))
    sent, found = sent_and_read(sums)
    assert form in sent and found.sha256 == sums.sha256
    assert size(sent) < SumsForm(width + 1).bytes(len(CLASSES))


def test_a_factor_tells_nothing_beyond_the_sums() -> None:
    """Rows in another order have the same sums, and the same bytes leave."""
    features, labels = rows_of(25, 300)
    order = torch.from_numpy(np.random.default_rng(3).permutation(25))
    one, other = (compact_statistics(sums_of(features[rows], labels[rows])) for rows in (slice(None), order))
    assert one.keys() == other.keys() and "factor" in one
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sums_whose_factor_might_round_to_others_leave_as_they_are() -> None:
    """Weights of 2^18 make products so large that half a step is less than the error of a product."""
    features, labels = rows_of(20, 200)
    of_class = sums_of(features[labels == 0], labels[labels == 0])
    sums = weighted([(of_class, 1 << 18)], 201, CLASSES)
    sent, found = sent_and_read(sums)
    assert "planes" in sent and found.sha256 == sums.sha256


def factor() -> dict[str, Tensor]:
    return compact_statistics(sums_of(*rows_of(5, 40)))


def planes(content: bytes) -> dict[str, Tensor]:
    sums = sums_of(*rows_of(60, 40))
    packed = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    return {"planes": packed, "sums": sums.sums, "counts": sums.counts}


LIES = {
    "an order that names a feature twice": {**factor(), "order": torch.zeros(40, dtype=torch.int32)},
    "an order of another length": {**factor(), "order": torch.arange(41, dtype=torch.int32)},
    "an order of another type": {**factor(), "order": torch.arange(40)},
    "no order": {name: tensor for name, tensor in factor().items() if name != "order"},
    "no factor": {name: tensor for name, tensor in factor().items() if name != "factor"},
    "a factor that is no trapezoid": {**factor(), "factor": factor()["factor"][:-1]},
    "a factor of too many rows": {**factor(), "factor": torch.ones(41 * 20 + 1, dtype=torch.float64)},
    "a factor of another type": {**factor(), "factor": factor()["factor"].float()},
    "a factor that is not finite": {**factor(), "factor": factor()["factor"] * torch.nan},
    "a factor that is too large": {**factor(), "factor": factor()["factor"] * 1e9},
    "sums of another width": {**factor(), "sums": torch.zeros(3, 40, dtype=torch.int64)},
    "a matrix too": {**factor(), "gram": torch.zeros(41 * 42 // 2, dtype=torch.int64)},
    "planes that are no stream": planes(b"nothing"),
    "planes that are cut short": planes(zlib.compress(bytes(8 * 861))[:-6]),
    "planes that are too few": planes(zlib.compress(bytes(8 * 860))),
    "planes that grow without end": planes(zlib.compress(bytes(1 << 24))),
    "planes of another type": {**planes(b"nothing"), "planes": torch.zeros(5)},
}


@pytest.mark.parametrize("lie", LIES)
def test_tensors_of_no_matrix_are_refused(lie: str) -> None:
    with pytest.raises(ProtocolError, match="StatisticsReply: statistics: found"):
        read_compact(LIES[lie], SumsForm(41), CLASSES)
