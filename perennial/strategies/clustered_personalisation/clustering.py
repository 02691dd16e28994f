"""Clusters vectors of sites, chooses the number of clusters, and measures how far vectors have moved.

Vectors are by site; whatever the order in which they came, they are taken in the order of the sites' names,
and clusters are numbered by their first site in that order. N sites, k entries, q clusters.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from perennial.foundation.errors import StateError
from perennial.foundation.streams import stream

Vectors = Mapping[str, np.ndarray]
"""site -> (k,) float64."""
Labels = dict[str, int]
"""site -> cluster, from 0."""

RESTARTS, ITERATIONS = 10, 300
MOST_CLUSTERS = 8
"""Tried by "auto"."""
LEAST_SILHOUETTE = 0.2
"""Below it "auto" finds no clusters at all."""


def cluster_by_k_means(vectors: Vectors, clusters: int | Literal["auto"], seed: int) -> Labels:
    """Clusters of near vectors (k-means++ with restarts; Arthur and Vassilvitskii 2007).

    "auto": as many clusters as have the best mean silhouette, 2 to 8, the fewer of equals; 1 when none is
    worth it. Raises StateError when there are fewer sites, or fewer different vectors, than clusters.
    """
    names, matrix = _build_matrix(vectors)
    different = len(np.unique(matrix, axis=0))
    if clusters == "auto":
        return normalise_labels(names, _choose_best(matrix, different, seed))
    for found, what in ((len(names), "sites gave a sparsity vector"), (different, "of them are different")):
        if not 1 <= clusters <= found:
            raise StateError(
                f"strategy.clusters: found {clusters}, but {found} {what}; allowed: 1 to {found}, or auto"
            )
    return normalise_labels(names, _fit(matrix, clusters, seed))


def cluster_by_threshold(vectors: Vectors) -> Labels:
    """Clusters of sites linked by distances below the middle of the widest gap between distances.

    The grouping rule of PFA is published without its threshold; the middle of the widest gap of the sorted
    pairwise distances is our choice. Liu et al. 2021 (PFA, WWW).
    """
    from sklearn.cluster import AgglomerativeClustering

    names, matrix = _build_matrix(vectors)
    if len(names) < 3:
        return normalise_labels(names, np.arange(len(names)))
    distances = np.sort(_compute_distances(matrix, matrix)[np.triu_indices(len(names), 1)])
    widest = int(np.argmax(np.diff(distances)))
    threshold = (distances[widest] + distances[widest + 1]) / 2
    if threshold == 0:
        return dict.fromkeys(names, 0)
    grouping = AgglomerativeClustering(
        n_clusters=None,  # pyright: ignore[reportArgumentType]
        distance_threshold=threshold,
        linkage="single",
    )
    return normalise_labels(names, grouping.fit_predict(matrix))


def cluster_at_random(sites: Sequence[str], clusters: int, seed: int) -> Labels:
    """Clusters of sites drawn at random, whose sizes differ by one site at most."""
    names = sorted(sites)
    order = stream(seed, "random-clusters").permutation(len(names))
    return normalise_labels(names, np.argsort(order) % clusters)


def normalise_labels(names: Sequence[str], labels: np.ndarray) -> Labels:
    """Labels of sites, renumbered by each cluster's first site. names: sorted. labels: (N,) of any kind."""
    numbers: dict[int, int] = {}
    return {
        name: numbers.setdefault(int(label), len(numbers)) for name, label in zip(names, labels, strict=True)
    }


def compute_centres(vectors: Vectors, labels: Mapping[str, int]) -> dict[int, np.ndarray]:
    """(k,) mean vector of each cluster, over the sites that have both a vector and a label."""
    members: dict[int, list[np.ndarray]] = {}
    for site in sorted(vectors.keys() & labels.keys()):
        members.setdefault(labels[site], []).append(vectors[site])
    return {cluster: np.mean(rows, axis=0) for cluster, rows in sorted(members.items())}


def find_nearest_centre(vector: np.ndarray, of: Mapping[int, np.ndarray]) -> int:
    """The cluster whose centre in `of` is nearest to the vector; of equals the lowest number."""
    return min(sorted(of), key=lambda cluster: float(np.linalg.norm(vector - of[cluster])))


def follow_majority(before: Mapping[str, int], now: Mapping[str, int]) -> Labels:
    """site -> cluster, for sites without one now: the cluster that most of their former cluster joined.

    Of equals the lowest. Sites whose former cluster has no member left in a cluster are left out.
    """
    went: dict[int, Counter[int]] = {}
    for site in sorted(before.keys() & now.keys()):
        went.setdefault(before[site], Counter())[now[site]] += 1
    return {
        site: min(went[cluster], key=lambda label: (-went[cluster][label], label))
        for site, cluster in sorted(before.items())
        if site not in now and cluster in went
    }


def has_drifted(before: Vectors, now: Vectors, of: Mapping[int, np.ndarray]) -> bool:
    """Whether a site has moved by more than half the distance between the two nearest of the centres `of`."""
    moved = [float(np.linalg.norm(now[site] - before[site])) for site in before.keys() & now.keys()]
    points = np.stack(list(of.values()))
    if not moved or len(points) < 2:
        return False
    return max(moved) > 0.5 * _compute_distances(points, points)[np.triu_indices(len(points), 1)].min()


def project_to_plane(vectors: Vectors) -> dict[str, tuple[float, float]]:
    """site -> (x, y) in the first two principal components, for a picture; signs are fixed."""
    names, matrix = _build_matrix(vectors)
    centred = matrix - matrix.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    axes = np.vstack([axes, np.zeros((2, matrix.shape[1]))])[:2]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    indices = centred @ (axes * np.where(largest < 0, -1.0, 1.0)).T
    return {name: (float(x), float(y)) for name, (x, y) in zip(names, indices, strict=True)}


def compute_adjusted_rand(labels: Mapping[str, int], truth: Mapping[str, int]) -> float | None:
    """Adjusted Rand index with known groups: 1 for the same, about 0 by chance; None if no site is in both.

    Hubert and Arabie 1985.
    """
    from sklearn.metrics import adjusted_rand_score

    sites = sorted(labels.keys() & truth.keys())
    if not sites:
        return None
    return float(adjusted_rand_score([truth[site] for site in sites], [labels[site] for site in sites]))


def _choose_best(matrix: np.ndarray, different: int, seed: int) -> np.ndarray:
    from sklearn.metrics import silhouette_score

    best, chosen = LEAST_SILHOUETTE, np.zeros(len(matrix), dtype=np.int64)
    for clusters in range(2, min(MOST_CLUSTERS, len(matrix) - 1, different) + 1):
        labels = _fit(matrix, clusters, seed)
        score = float(silhouette_score(matrix, labels))
        if score > best or (clusters == 2 and score == best):
            best, chosen = score, labels
    return chosen


def _fit(matrix: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans

    state = int(stream(seed, "k-means", clusters).integers(2**31))
    means = KMeans(
        clusters,
        n_init=RESTARTS,  # pyright: ignore[reportArgumentType]
        max_iter=ITERATIONS,
        random_state=state,
    )
    return means.fit_predict(matrix)


def _compute_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.norm(a[:, None] - b[None], axis=2)


def _build_matrix(vectors: Vectors) -> tuple[list[str], np.ndarray]:
    names = sorted(vectors)
    return names, np.stack([vectors[name] for name in names]).astype(np.float64)
