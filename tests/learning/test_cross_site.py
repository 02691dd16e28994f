"""What sites' sums say of each other: errors are those of the records, liars stand out, the null is null."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.learning.analytic.cross_site import (
    LAMBDAS,
    added,
    basis_of,
    class_differences,
    cross_site,
    error_on,
    guess_error,
    turned,
)
from perennial.learning.analytic.solve import Sums, best_by_gcv, ridge
from perennial.learning.analytic.statistics import Collector
from perennial.models.feature_maps.ball import on_grid

CLASSES = 4
MEANS = torch.randn(CLASSES, 30, generator=torch.Generator().manual_seed(9))


def records(
    samples: int, seed: int, spread: float = 2.0, classes: Sequence[int] = range(CLASSES)
) -> tuple[Tensor, Tensor]:
    """(features, labels) of one population."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(list(classes))[torch.randint(0, len(classes), (samples,), generator=generator)]
    return on_grid(MEANS[labels] + spread * torch.randn(samples, 30, generator=generator)), labels


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
    head = ridge(sums(*records(200, 4, classes=(0, 1, 2))), 0.01)
    known = torch.tensor([True, True, True, False])
    direct = (head.scores(features)[:, known] - torch.nn.functional.one_hot(labels, 4)[:, known]).square()
    expected = float(direct.sum()) / int(known[labels].sum())
    assert error_on(head, sums(features, labels), known) == pytest.approx(expected, rel=1e-12)
    frequency = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    guess = (frequency[known] - torch.nn.functional.one_hot(labels, 4)[:, known]).square()
    expected = float(guess.sum()) / int(known[labels].sum())
    assert guess_error(frequency, sums(features, labels), known) == pytest.approx(expected, rel=1e-12)


def test_a_site_without_a_known_class_cannot_be_judged() -> None:
    sites = {f"site-{k}": sums(*records(60, k, classes=(0, 1))) for k in range(3)}
    sites["other"] = sums(*records(60, 8, classes=(2, 3)))
    found = cross_site(sites)
    assert found.rows["other"].apart is None and "other" not in found.marked
    assert found.marked == {}
    assert set(found.rows["site-0"].benefit) == {"site-1", "site-2"}
    assert "other" not in found.given


def test_with_one_class_nobody_is_judged_and_no_guess_of_error_zero_is_divided_by() -> None:
    table = cross_site({f"site-{k}": sums(*records(50, k, classes=(2,))) for k in range(3)})
    assert {(row.apart, row.skill) for row in table.rows.values()} == {(None, None)}
    assert table.given == table.marked == {}


def test_benefit_is_what_leaving_a_site_out_costs_another() -> None:
    sites = federation(3)
    found = cross_site(sites)
    shrinkage = best_by_gcv(added([sites["site-1"], sites["site-2"]]), LAMBDAS)
    known = torch.ones(CLASSES, dtype=torch.bool)
    with_it = error_on(ridge(added([sites["site-1"], sites["site-2"]]), shrinkage), sites["site-0"], known)
    without = error_on(ridge(sites["site-2"], shrinkage), sites["site-0"], known)
    assert with_it is not None and without is not None
    assert found.rows["site-0"].apart == pytest.approx(with_it)
    assert found.rows["site-0"].benefit["site-1"] == pytest.approx((without - with_it) / with_it)


@pytest.mark.parametrize("times", [1.0, 10.0, 1000.0])
def test_flipped_labels_stand_out_and_honest_sites_do_not(times: float) -> None:
    found = cross_site({**federation(), "liar": flipped(times=times)})
    assert set(found.marked) == {"liar"}, found
    assert found.given["liar"] < min(value for name, value in found.given.items() if name != "liar")


def test_honest_sites_are_not_marked() -> None:
    for samples in (40, 150, 600):
        assert cross_site(federation(7, samples)).marked == {}


def test_two_sites_are_too_few() -> None:
    with pytest.raises(DataError, match="three or more"):
        cross_site(federation(2))


def test_a_projection_keeps_what_it_spans() -> None:
    sites = federation(4)
    basis = basis_of(added(list(sites.values())), 29)
    assert basis is not None and basis.shape == (30, 29)
    assert basis_of(added(list(sites.values())), 30) is None
    small = {name: turned(each, basis) for name, each in sites.items()}
    full, reduced = cross_site(sites), cross_site(small)
    assert reduced.features == 29 and full.features == 30
    for name, row in full.rows.items():
        assert reduced.rows[name].apart == pytest.approx(row.apart, rel=0.2)


def test_differences_of_one_population_are_about_one() -> None:
    found = []
    for seed in range(30):
        sites = {f"s{k}": sums(*records(80 + 60 * k, 1000 * seed + k)) for k in range(4)}
        found += class_differences(sites)
    values = torch.tensor([each.t for each in found])
    assert len(found) == 30 * CLASSES * 6
    assert 0.95 < float(values.mean()) < 1.05


def test_another_camera_and_another_meaning_are_seen_in_their_class() -> None:
    sites = federation(4, 300)
    features, labels = records(300, 50)
    moved = features.clone()
    moved[labels == 2] = on_grid(moved[labels == 2] + 0.1)
    sites["camera"] = sums(moved, labels)
    found = class_differences(sites)
    strange = [each.t for each in found if "camera" in each.sites and each.label == 2]
    usual = [each.t for each in found if "camera" not in each.sites or each.label != 2]
    assert min(strange) > 2 * max(usual)
    assert min(each.effect for each in found if "camera" in each.sites and each.label == 2) > 0.1


def test_few_records_of_a_class_are_not_compared() -> None:
    sites = {f"site-{k}": sums(*records(30, k, classes=(0, 1))) for k in range(3)}
    sites["few"] = sums(*records(9, 5, classes=(0,)))
    assert not [each for each in class_differences(sites) if "few" in each.sites]


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
