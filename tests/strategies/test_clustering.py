"""Groups of sites: found whatever the seed and the order, numbered one way, refused where there are none."""

import numpy as np
import pytest

from perennial.foundation.errors import StateError
from perennial.strategies.clustered_personalisation.clustering import (
    cluster_by_k_means,
    cluster_by_threshold,
    compute_adjusted_rand,
    has_drifted,
)


def two_groups(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {f"site-{i}": (i % 2) * 0.5 + 0.01 * generator.random(4) for i in range(8)}


@pytest.mark.parametrize("seed", range(5))
def test_two_groups_are_found(seed: int) -> None:
    truth = {f"site-{i}": i % 2 for i in range(8)}
    vectors = two_groups(seed)
    for labels in (
        cluster_by_k_means(vectors, 2, seed),
        cluster_by_k_means(vectors, "auto", seed),
        cluster_by_threshold(vectors),
    ):
        assert labels == truth
        assert compute_adjusted_rand(labels, truth) == 1.0


def test_too_many_clusters_are_refused() -> None:
    same = dict.fromkeys("abc", np.ones(2))
    with pytest.raises(StateError, match="found 2, but 1 of them are different"):
        cluster_by_k_means(same, 2, 1)
    with pytest.raises(StateError, match="found 4, but 3 sites gave a sparsity vector"):
        cluster_by_k_means(same, 4, 1)
    with pytest.raises(StateError, match="found 0"):
        cluster_by_k_means(same, 0, 1)
    assert set(cluster_by_k_means(same, "auto", 1).values()) == {0}
    assert set(cluster_by_threshold(same).values()) == {0}


def test_auto_finds_no_cluster_in_noise() -> None:
    generator = np.random.default_rng(0)
    vectors = {f"site-{i}": generator.random(32) for i in range(20)}
    assert set(cluster_by_k_means(vectors, "auto", 1).values()) == {0}


def test_drift_is_measured_against_half_the_least_distance_of_centres() -> None:
    of = {0: np.array([0.0]), 1: np.array([0.4]), 2: np.array([1.0])}
    before = {"a": np.array([0.0]), "b": np.array([0.4])}
    assert not has_drifted(before, {"a": np.array([0.2]), "b": np.array([0.4])}, of)
    assert has_drifted(before, {"a": np.array([0.21]), "b": np.array([0.4])}, of)
    assert not has_drifted(before, {"stranger": np.array([0.9])}, of)
