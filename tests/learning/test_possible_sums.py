"""Sums that no records have are told from those of records, in the clear, weighted, and under noise."""

import pytest
import torch

from perennial.foundation.errors import ProtocolError
from perennial.foundation.streams import stream
from perennial.learning.analytic.statistics import (
    PRODUCT,
    WEIGHT,
    Collector,
    Statistics,
    pack_triangle,
    sum_weighted,
    unpack_triangle,
)
from perennial.models.feature_maps.projection import CONSTANT_STEPS, RADIUS_SQUARED, round_to_grid
from perennial.privacy.noised_sums import SumsNoise, add_noise_to_sums
from perennial.strategies.analytic.checks import MOST_NOISED, check_exact, check_noised, check_range
from tests.seeded_noise import SeededNoise

FEATURES, CLASSES = 40, 3


def honest(samples: int = 60, seed: int = 1, features: int = FEATURES, spread: float = 1.0) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    raw = 1 + spread * torch.randn(samples, features, generator=generator)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    collector = Collector(features, range(CLASSES))
    collector.add(round_to_grid(raw), labels)
    return collector.finish()


def altered(found: Statistics, **tensors: torch.Tensor) -> Statistics:
    parts = {"gram": found.gram, "sums": found.sums, "counts": found.counts} | tensors
    return Statistics(parts["gram"], parts["sums"], parts["counts"], found.classes)


def noised(found: Statistics, multiplier: float, seed: int = 1) -> Statistics:
    """The release of these sums: without the constant, half the weight on products."""
    gram = pack_triangle(unpack_triangle(found.gram, found.width)[:-1, :-1])
    source = SeededNoise(stream(seed, "test"))
    tensors = add_noise_to_sums(
        gram, found.sums[:, :-1], found.counts, multiplier, source, radius_squared=RADIUS_SQUARED
    )
    return Statistics(*tensors, found.classes)


def noise_of(multiplier: float) -> SumsNoise:
    return SumsNoise.of(multiplier, FEATURES, radius_squared=RADIUS_SQUARED)


@pytest.mark.parametrize(
    ("samples", "features", "spread"),
    [(1, 40, 1.0), (2, 40, 0.0), (60, 40, 1.0), (500, 300, 1e-3), (30, 700, 1.0)],
)
def test_sums_of_records_pass(samples: int, features: int, spread: float) -> None:
    for seed in range(5):
        check_exact(honest(samples, seed, features, spread))
    check_exact(Statistics.build_empty(features + 1, range(CLASSES)))


def test_weighted_sums_of_records_pass() -> None:
    parts = [honest(20, seed) for seed in range(3)]
    weights = [round(WEIGHT / part.samples) for part in parts]
    one = [
        Statistics(p.gram, p.sums.sum(0, keepdim=True), p.counts.sum(0, keepdim=True), range(k, k + 1))
        for k, p in enumerate(parts)
    ]
    check_exact(sum_weighted(zip(one, weights, strict=True), FEATURES + 1, range(CLASSES)), weights)


def with_gram(found: Statistics, change: torch.Tensor) -> Statistics:
    return altered(found, gram=pack_triangle(unpack_triangle(found.gram, found.width) + change))


def crafted(kind: str) -> Statistics:
    found, width = honest(), FEATURES + 1
    change = torch.zeros(width, width, dtype=torch.float64)
    if kind == "no sum of squares":
        change[0, 1] = change[1, 0] = 8.0
        return with_gram(found, change)
    if kind == "flipped means":
        # another site's sums of classes with this one's products: more between the classes than in all
        sums = found.sums.clone()
        sums[:, :-1] *= -1
        sums[0, :-1] = (found.sums[0, :-1].double() * 1.6).long()
        rest = found.sums[:, :-1].sum(0) - sums[:, :-1].sum(0)
        sums[1, :-1] += rest
        return altered(found, sums=sums)
    if kind == "little energy":
        change = -0.16 * torch.diag(unpack_triangle(found.gram, width).diagonal())
        change[-1, -1] = 0.0
        return with_gram(found, change)
    if kind == "a long class":
        sums, gram = found.sums.clone(), unpack_triangle(found.gram, width)
        sums[0, 0] += (int(found.counts[0]) << 16) - int(sums[0, 0])
        gram[0, -1] = gram[-1, 0] = int(sums[:, 0].sum()) * CONSTANT_STEPS / PRODUCT
        return altered(found, sums=sums, gram=pack_triangle(gram))
    if kind == "the least integer":
        return altered(found, sums=found.sums.index_fill(1, torch.tensor([3]), -(2**63)))
    raise KeyError(kind)


KINDS = ["no sum of squares", "flipped means", "little energy", "a long class", "the least integer"]


@pytest.mark.parametrize("kind", KINDS)
def test_crafted_sums_are_refused(kind: str) -> None:
    with pytest.raises(ProtocolError, match="no samples have such sums"):
        check_exact(crafted(kind))


def test_boosted_sums_are_those_of_more_records_and_pass() -> None:
    found = honest()
    check_exact(altered(found, gram=found.gram * 1000, sums=found.sums * 1000, counts=found.counts * 1000))


@pytest.mark.parametrize("multiplier", [0.1, 1.0, 5.0])
def test_noised_sums_of_records_pass(multiplier: float) -> None:
    for seed in range(20):
        check_noised(noised(honest(400, seed), multiplier, seed), noise_of(multiplier))


def test_noised_sums_pass_as_a_total_of_many_sites() -> None:
    parts = [noised(honest(100, seed), 1.0, seed) for seed in range(9)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    check_noised(total, noise_of(1.0).of_many(9), 9)


def test_what_the_noise_does_not_explain_is_refused() -> None:
    noise, found = noise_of(1.0), noised(honest(4000), 1.0)
    boosted = altered(found, sums=found.sums * 2)
    small = altered(found, gram=found.gram // 2)
    wild = torch.zeros(FEATURES, FEATURES, dtype=torch.float64)
    wild[0, 1] = wild[1, 0] = 4000.0
    for bad in (boosted, small, with_gram(found, wild)):
        with pytest.raises(ProtocolError, match="no samples have such sums"):
            check_noised(bad, noise)


@pytest.mark.parametrize("name", ["gram", "sums", "counts"])
@pytest.mark.parametrize("value", [-(2**63), -MOST_NOISED, MOST_NOISED])
def test_no_value_beyond_the_range_passes(name: str, value: int) -> None:
    found = honest()
    tensor = getattr(found, name).clone()
    tensor.view(-1)[1] = value
    with pytest.raises(ProtocolError, match=f"{name}: found 2\\^56"):
        check_range(altered(found, **{name: tensor}))
