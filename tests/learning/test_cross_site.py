"""What sites' sums say of each other: errors are those of the records, liars stand out, the null is null."""

from collections.abc import Sequence

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from perennial.learning.analytic.cross_site import (
    compare_labels,
    cross_site,
    guess_error,
    measure_error,
)
from perennial.learning.analytic.solve import Sums, solve_ridge
from perennial.learning.analytic.statistics import Collector
from perennial.models.feature_maps.pixels import RandomReLU
from perennial.models.feature_maps.projection import round_to_grid

CLASSES = 4
MEANS = torch.randn(CLASSES, 30, generator=torch.Generator().manual_seed(9))


def records(
    samples: int, seed: int, spread: float = 2.0, classes: Sequence[int] = range(CLASSES)
) -> tuple[Tensor, Tensor]:
    """(features, labels) of one population."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(list(classes))[torch.randint(0, len(classes), (samples,), generator=generator)]
    return round_to_grid(MEANS[labels] + spread * torch.randn(samples, 30, generator=generator)), labels


def sums(features: Tensor, labels: Tensor) -> Sums:
    collector = Collector(features.shape[1], range(CLASSES))
    collector.add(features, labels)
    return Sums.of(collector.finish())


def federation(sites: int = 5, samples: int = 150) -> dict[str, Sums]:
    return {f"site-{k}": sums(*records(samples, k)) for k in range(sites)}


def flipped(samples: int = 150, seed: int = 77, times: float = 1.0) -> Sums:
    features, labels = records(samples, seed)
    one = sums(features, CLASSES - 1 - labels)
    return Sums(one.gram * times, one.sums * times, one.counts * times, one.constant)


def test_the_error_of_a_head_follows_from_the_sums() -> None:
    features, labels = records(80, 3, classes=(0, 1, 3))
    head = solve_ridge(sums(*records(200, 4, classes=(0, 1, 2))), 0.01)
    known = torch.tensor([True, True, True, False])
    direct = (head.scores(features)[:, known] - torch.nn.functional.one_hot(labels, 4)[:, known]).square()
    expected = float(direct.sum()) / int(known[labels].sum())
    assert measure_error(head, sums(features, labels), known) == pytest.approx(expected, rel=1e-12)
    frequency = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    guess = (frequency[known] - torch.nn.functional.one_hot(labels, 4)[:, known]).square()
    expected = float(guess.sum()) / int(known[labels].sum())
    assert guess_error(frequency, sums(features, labels), known) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("times", [1.0, 10.0, 1000.0])
def test_flipped_labels_stand_out_and_honest_sites_do_not(times: float) -> None:
    found = cross_site({**federation(), "liar": flipped(times=times)})
    assert set(found.marked) == {"liar"}, found
    assert found.given["liar"] < min(value for name, value in found.given.items() if name != "liar")


def test_honest_sites_are_not_marked() -> None:
    for samples in (40, 150, 600):
        assert cross_site(federation(7, samples)).marked == {}


@pytest.mark.parametrize(("each", "marked"), [(9, set()), (10, {"other"})])
def test_a_site_of_too_few_records_to_compare_is_not_marked(each: int, marked: set[str]) -> None:
    """Its classes are unlike the others', which fewer records than are compared cannot show."""
    labels = torch.arange(CLASSES).repeat(each)
    noise = torch.randn(len(labels), 30, generator=torch.Generator().manual_seed(each))
    found = cross_site({**federation(), "other": sums(round_to_grid(noise - MEANS[labels]), labels)})
    assert (found.rows["other"].skill or 0.0) < 0 and set(found.marked) == marked


def test_a_site_is_marked_that_gives_all_its_records_one_label() -> None:
    features, _ = records(150, 50, classes=(1, 2, 3))
    alone = sums(features, torch.zeros(150, dtype=torch.int64))
    assert set(cross_site({**federation(), "alone": alone}).marked) == {"alone"}


def test_two_liars_are_marked_one_by_one_and_no_honest_site_beside_them() -> None:
    liars = {f"liar-{k}": flipped(seed=70 + k, times=1000.0) for k in range(2)}
    assert set(cross_site({**federation(6), **liars}).marked) == set(liars)


def test_where_the_others_model_fits_most_sites_worse_than_a_guess_nobody_is_marked() -> None:
    draws = torch.Generator().manual_seed(5)
    sites = {}
    for number in range(6):
        features, labels = records(20, 300 + number)
        sites[f"site-{number}"] = sums(features, labels[torch.randperm(len(labels), generator=draws)])
    found = cross_site(sites)
    skills = sorted(row.skill for row in found.rows.values() if row.skill is not None)
    assert skills[len(skills) // 2] <= 0 and skills[0] < 0
    assert found.marked == {}


def digits_at_hospitals(seed: int, fault: str) -> dict[str, Sums]:
    """Five hospitals with a fifth of digits each, on 400 random features; site-0 has the fault."""
    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels).float().reshape(-1, 8, 8), torch.tensor(targets)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    features = RandomReLU(400, (64,), seed)
    found = {}
    for number, part in enumerate(order.chunk(5)):
        own, known = images[part], labels[part].clone()
        if number == 0 and fault == "one pixel to the right":
            own = torch.nn.functional.pad(own, (1, 0))[:, :, :8]
        elif number == 0 and fault == "darker":
            own = 0.6 * own
        elif number == 0 and fault == "two labels swapped":
            known[labels[part] == 3], known[labels[part] == 8] = 8, 3
        elif number == 0 and fault == "invented":
            own = 16 * torch.rand(own.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            mapped = round_to_grid(
                torch.nn.functional.normalize(features((own.flatten(1) - 8) / 6)) * 0.5**0.5
            )
        collector = Collector(400, range(10))
        collector.add(mapped, known)
        found[f"site-{number}"] = Sums.of(collector.finish())
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_swapped_labels_are_found_and_neither_a_shift_nor_another_brightness_is(seed: int) -> None:
    found = cross_site(digits_at_hospitals(seed, "two labels swapped")).marked
    assert set(found) == {"site-0"}
    assert "its class 3 for their 8" in found["site-0"] and "its class 8 for their 3" in found["site-0"]
    for fault in ("none", "one pixel to the right", "darker"):
        assert cross_site(digits_at_hospitals(seed, fault)).marked == {}, fault
    assert set(cross_site(digits_at_hospitals(seed, "invented")).marked) == {"site-0"}


def test_labels_are_compared_where_two_other_sites_have_the_classes() -> None:
    sites = {"site-0": flipped(), **{f"site-{k}": sums(*records(150, k)) for k in (1, 2)}}
    assert compare_labels(sites)["site-0"].contradicted == {0: 3, 1: 2, 2: 1, 3: 0}
    sites["site-2"] = sums(*records(150, 2, classes=(0, 1)))
    assert compare_labels(sites)["site-0"].contradicted == {}
