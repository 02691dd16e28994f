"""Every way to divide samples among simulated sites, and the arithmetic beneath."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.data.partition import Partition, apportion, group_holders, group_of_site, partition_samples
from perennial.data.tasks_config import PartitionConfig
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream

BOUNDARIES = (0, 3, 5)
NAMES = tuple("abcde")

kinds = st.sampled_from(
    [
        {"kind": "iid"},
        {"kind": "dirichlet", "alpha": 0.5, "min_samples": 1},
        {"kind": "class_subset", "classes_per_site": 2},
    ]
)


def divide(options: dict[str, Any], labels: np.ndarray, sites: int = 3, seed: int = 0) -> Partition:
    config = PartitionConfig.model_validate(options)
    return partition_samples(config, labels, sites, seed, BOUNDARIES, names=NAMES)


def class_counts(found: Partition, labels: np.ndarray, classes: int = 5) -> np.ndarray:
    """(sites, classes)."""
    return np.stack([np.bincount(labels[rows], minlength=classes) for rows in found.indices])


def some_labels(sizes: list[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(deadline=None, max_examples=60)
@given(options=kinds, sizes=st.lists(st.integers(6, 40), min_size=5, max_size=5), seed=st.integers(0, 1000))
def test_a_division_is_a_partition_that_its_seed_decides(
    options: dict[str, Any], sizes: list[int], seed: int
) -> None:
    labels = some_labels(sizes)
    found = divide(options, labels, seed=seed)
    assert np.array_equal(np.sort(np.concatenate(found.indices)), np.arange(len(labels)))
    assert all(rows.dtype == np.int64 and np.all(np.diff(rows) > 0) for rows in found.indices)
    again = divide(options, labels, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(found.indices, again.indices, strict=True))


@settings(deadline=None, max_examples=40)
@given(options=kinds, seed=st.integers(0, 1000))
def test_a_task_is_divided_the_same_whatever_other_tasks_there_are(
    options: dict[str, Any], seed: int
) -> None:
    labels = some_labels([20, 15, 30, 12, 25])
    first = np.flatnonzero(labels < 3)
    config = PartitionConfig.model_validate(options)
    alone = partition_samples(config, labels[first], 3, seed, (0, 3), names=NAMES)
    whole = divide(options, labels, seed=seed)
    for rows_alone, rows in zip(alone.indices, whole.indices, strict=True):
        assert np.array_equal(first[rows_alone], rows[labels[rows] < 3])


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=5, max_size=5), sites=st.integers(1, 7))
def test_iid_parts_differ_by_at_most_one_in_each_class_and_task(sizes: list[int], sites: int) -> None:
    labels = some_labels(sizes)
    counts = class_counts(divide({"kind": "iid"}, labels, sites), labels)
    assert np.ptp(counts, axis=0).max() <= 1
    for low, high in ((0, 3), (3, 5)):
        assert np.ptp(counts[:, low:high].sum(axis=1)) <= 1


def test_dirichlet_gives_every_site_its_least_in_every_task() -> None:
    labels = some_labels([60] * 5)
    for seed in range(5):
        counts = class_counts(
            divide({"kind": "dirichlet", "alpha": 0.5, "min_samples": 12}, labels, 5, seed), labels
        )
        assert counts[:, :3].sum(axis=1).min() >= 12
        assert counts[:, 3:].sum(axis=1).min() >= 12


def test_an_impossible_dirichlet_names_alpha_and_min_samples() -> None:
    labels = some_labels([60] * 5)
    with pytest.raises(ConfigError, match=r"alpha 0\.001 and min_samples 30: none of 1000 draws"):
        divide({"kind": "dirichlet", "alpha": 1e-3, "min_samples": 30}, labels, 5)
    with pytest.raises(ConfigError, match="task 2 has 120 training samples, but 5 sites need 150"):
        divide({"kind": "dirichlet", "alpha": 0.5, "min_samples": 30}, labels, 5)


@settings(deadline=None)
@given(sites=st.integers(2, 8), classes=st.integers(1, 9), data=st.data())
def test_class_subsets_leave_no_class_out_and_spread_the_holders(
    sites: int, classes: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(-(-classes // sites), classes))
    labels = some_labels([40] * classes)
    config = PartitionConfig(kind="class_subset", classes_per_site=wanted)
    found = partition_samples(
        config, labels, sites, data.draw(st.integers(0, 99)), (0, classes), names=tuple("abcdefghij")
    )
    counts = class_counts(found, labels, classes)
    holders = (counts > 0).sum(axis=0)
    assert ((counts > 0).sum(axis=1) == wanted).all()
    assert set(holders) <= {sites * wanted // classes, -(-sites * wanted // classes)}
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_disjoint_subsets_share_no_class() -> None:
    labels = some_labels([20] * 10)
    config = PartitionConfig(kind="class_subset", classes_per_site="disjoint")
    counts = class_counts(
        partition_samples(config, labels, 4, 3, (0, 10), names=tuple("abcdefghij")), labels, 10
    )
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert sorted((counts > 0).sum(axis=1)) == [2, 2, 3, 3]


def test_impossible_subsets_say_what_is_possible() -> None:
    labels = some_labels([20] * 5)
    with pytest.raises(ConfigError, match="4, but task 1 has 3 classes for 2 sites; allowed: 2 to 3"):
        divide({"kind": "class_subset", "classes_per_site": 4}, labels, 2)
    with pytest.raises(ConfigError, match="1, but task 1 has 3 classes for 2 sites; allowed: 2 to 3"):
        divide({"kind": "class_subset", "classes_per_site": 1}, labels, 2)
    with pytest.raises(ConfigError, match="'disjoint', but task 1 has 3 classes for 4 sites"):
        divide({"kind": "class_subset", "classes_per_site": "disjoint"}, labels, 4)


@settings(deadline=None)
@given(
    totals=st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    shares=st.lists(st.floats(0.001, 10), min_size=1, max_size=9),
)
def test_apportioned_numbers_sum_exactly_and_stay_within_one(totals: list[int], shares: list[float]) -> None:
    found = apportion(np.array(totals), np.tile(shares, (len(totals), 1)))
    exact = np.outer(totals, np.array(shares) / sum(shares))
    assert found.sum(axis=1).tolist() == totals
    assert np.abs(found - exact).max() < 1 + 1e-6


def test_sites_of_a_group_share_its_classes_and_every_class_is_held() -> None:
    holds = group_holders(100, 20, 4, 20, 5, stream(1, "test"))
    assert holds.sum(axis=0).tolist() == [25] * 20
    assert holds.any(axis=1).all()
    groups = group_of_site(20, 4)
    for group in range(4):
        assert holds[:, groups == group].all(axis=1).sum() >= 20
    for shared, own, reason in [(26, 5, "up to 25"), (20, 0, "1 to 80"), (20, 81, "1 to 80")]:
        with pytest.raises(ConfigError, match=reason):
            group_holders(100, 20, 4, shared, own, stream(1, "test"))
    with pytest.raises(ConfigError, match="allowed 1 to 3"):
        group_holders(8, 3, 4, 2, 1, stream(1, "test"))
