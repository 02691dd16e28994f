"""Digests: what is mixed, what the noise is worth, and what is refused. Values computed by hand."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from perennial.foundation.errors import DataError
from perennial.foundation.streams import stream
from perennial.privacy.config import DigestConfig
from perennial.privacy.digests import (
    DigestGuarantee,
    Digests,
    compute_guarantee,
    draw_groups,
    draw_randomised_labels,
    guess_log10,
    make_digests,
    mix,
)
from perennial.privacy.noise import add_laplace
from tests.seeded_noise import SeededNoise

N, M = 22, 3
SHAPE = (4, 2, 2)
LENGTH = 16


def samples(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(N, *SHAPE, generator=generator), torch.randint(0, M, (N,), generator=generator)


def groups_stream():
    return stream(7, "digest-groups", "site-0", 1)


def made(config: DigestConfig, features=None, labels=None) -> tuple[Digests, DigestGuarantee]:
    x, y = samples()
    x, y = x if features is None else features, y if labels is None else labels
    return make_digests(x, y, range(M), config, groups_stream(), SeededNoise(stream(7, "noise")))


def test_one_sample_per_digest_without_noise_is_the_features_in_another_order() -> None:
    x, y = samples()
    digests, guarantee = made(DigestConfig(per_digest=1))
    order = digests.groups.flatten()
    assert sorted(order.tolist()) == list(range(N))
    assert torch.equal(digests.features, x[order])
    assert torch.equal(digests.labels, F.one_hot(y[order], M).float())
    assert guarantee.epsilon == math.inf


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_each_sample_is_used_once_and_labels_are_conserved(size: int) -> None:
    x, y = samples()
    digests, _ = made(DigestConfig(per_digest=size))
    used = digests.groups.flatten()
    assert len(digests.features) == N // size == len(used) // size
    assert len(set(used.tolist())) == len(used)
    assert torch.allclose(size * digests.labels.sum(0), torch.bincount(y[used], minlength=M).float())
    assert (digests.labels >= 0).all()
    assert torch.allclose(digests.labels.sum(1), torch.ones(N // size))
    assert torch.allclose(digests.features.mean(0), x[used].mean(0), atol=1e-6)


def test_within_class_mixes_no_two_classes_and_names_those_that_are_too_small() -> None:
    x = torch.rand(11, *SHAPE)
    y = torch.tensor([0] * 8 + [1] * 3)
    digests = mix(x, y, M, DigestConfig(mix="within_class"), groups_stream())
    assert digests.labels.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert digests.short_classes == (1,)


@pytest.mark.parametrize("place", [0, 9, 21])
def test_replacing_a_sample_changes_one_row_by_no_more_than_the_sensitivity(place: int) -> None:
    config = DigestConfig(largest=1.0)
    x, y = samples()
    other = x.clone()
    other[place] = 1 - x[place].round()
    before, after = made(config, x, y)[0], made(config, other, y)[0]
    change = (before.features - after.features).flatten(1).abs().sum(1)
    assert (change > 0).sum() == int(place in before.groups)
    assert change.max() <= LENGTH * 1.0 / 4 + 1e-6


def test_laplace_noise_has_its_scale() -> None:
    noise = torch.zeros(400_000)
    add_laplace(noise, 0.3, SeededNoise(stream(1, "noise")))
    assert noise.abs().mean() == pytest.approx(0.3, rel=0.02)
    assert noise.var() == pytest.approx(2 * 0.3**2, rel=0.02)


def test_the_published_noise_and_what_it_is_worth() -> None:
    config = DigestConfig(protection="paper", epsilon=0.005, largest=1.0)
    guarantee = compute_guarantee(config, length=256, largest=1.0)
    assert guarantee.scale == pytest.approx(0.01)
    assert guarantee.nominal == 0.005
    assert guarantee.epsilon == pytest.approx(6400)
    assert compute_guarantee(config, 1, 1.0).epsilon == pytest.approx(25)
    assert compute_guarantee(config.model_copy(update={"per_digest": 1}), 256, 1.0).epsilon == pytest.approx(
        25600
    )
    # a scale that is taken from the data has no guarantee at all
    private = DigestConfig(protection="paper", epsilon=0.005)
    guarantee = compute_guarantee(private, 256, 3.7)
    assert guarantee.epsilon == math.inf
    assert guarantee.if_public == pytest.approx(6400)


def test_honest_noise_is_sized_by_what_one_sample_changes() -> None:
    laplace = DigestConfig(protection="laplace", epsilon=8, largest=1.0)
    assert compute_guarantee(laplace, 256, 1.0) == DigestGuarantee(8.0, 8, 8, 0.0, None, math.inf)
    gauss = DigestConfig(protection="gauss", epsilon=8, norm=1.0)
    guarantee = compute_guarantee(gauss, 256, 1.0)
    assert guarantee.scale == pytest.approx(math.sqrt(2) / 4 * 0.600, abs=0.001)
    assert (guarantee.epsilon, guarantee.delta) == (8, 1e-5)


def test_gauss_cuts_every_sample_to_the_norm_first() -> None:
    quiet = DigestConfig(protection="gauss", epsilon=1e5, norm=0.5, per_digest=1)
    digests, _ = made(quiet)
    assert torch.linalg.vector_norm(digests.features.flatten(1), dim=1) == pytest.approx(
        torch.full((N,), 0.5), abs=0.05
    )


def test_randomised_labels_keep_the_share_that_epsilon_allows() -> None:
    labels = torch.full((60_000,), 4)
    answers = draw_randomised_labels(labels, range(3, 6), math.log(2), SeededNoise(stream(3, "noise")))
    shares = torch.bincount(answers, minlength=6)[3:] / len(labels)
    assert shares.tolist() == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_the_guess_heuristic() -> None:
    assert guess_log10(256, 2**32, 1) == 0.0
    assert 10 ** guess_log10(1, 4, 2) == pytest.approx(0.320833, abs=1e-6)
    # kappa(V) = C(V + 2, 2): 3, 6, 10, 15
    assert 10 ** guess_log10(1, 4, 3) == pytest.approx((1 / 3 + 1 / 6 + 1 / 10 + 1 / 15) / 4)
    assert guess_log10(256, 2**32, 2) == pytest.approx(-2118.6, abs=6)
    assert guess_log10(256, 2**32, 4) < guess_log10(256, 2**32, 3) < guess_log10(256, 2**32, 2)


def test_too_few_samples_are_refused_and_impossible_features_count_as_zero() -> None:
    """A refusal that tells of one sample's features would be a release without a charge."""
    with pytest.raises(DataError, match="per_digest: 32, but this site has 22 samples"):
        draw_groups(samples()[1], DigestConfig(per_digest=32), groups_stream())
    for value, zeroed in ((-0.1, (3, 0, 0, 0)), (math.nan, (3,)), (math.inf, (3,))):
        x, with_zeros = samples()[0], samples()[0]
        x[3, 0, 0, 0] = value
        with_zeros[zeroed] = 0
        found = made(DigestConfig(), features=x)[0].features
        assert torch.equal(found, made(DigestConfig(), features=with_zeros)[0].features)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"per_digest": 0}, "greater than or equal to 1"),
        ({"protection": "laplace", "epsilon": 0, "largest": 1}, "greater than 0"),
        ({"protection": "laplace", "epsilon": 1, "largest": 0}, "greater than 0"),
        ({"protection": "laplace", "epsilon": 1, "largest": math.inf}, "finite"),
        ({"protection": "laplace", "epsilon": 1}, "largest is missing"),
        ({"protection": "gauss", "epsilon": 1}, "norm is missing"),
        ({"protection": "paper"}, "epsilon is missing"),
        ({"epsilon": 1}, "adds no noise"),
        ({"label_epsilon": 1, "mix": "within_class"}, "groups by the labels"),
    ],
)
def test_settings_that_make_no_sense_are_refused(block: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        DigestConfig.model_validate(block)
