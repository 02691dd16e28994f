"""Which rule finds the number of groups of synth_groups, from the vectors of the last ReLU layer.

`python -m benchmarks.cluster_numbers` trains the global model of experiments/fedperc_synth.yaml
once for each seed that benchmarks/results/cluster_numbers.json lacks, keeps the sites' vectors there, and
writes the table. Symbols: N sites, k entries of a vector.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.cluster.hierarchy import linkage
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, calinski_harabasz_score, silhouette_score

from benchmarks.sparsity_vectors import CLUSTERS, SEEDS, VECTORS, global_model, plan_of
from benchmarks.table import RESULTS
from perennial.config.simulation import simulated_federation
from perennial.data.augmentation import to_float
from perennial.models.saved import load_saved
from perennial.models.sparsity import zero_shares

RECORD, PAGE = RESULTS / "cluster_numbers.json", RESULTS / "cluster_numbers.md"
VECTOR = "the third layer alone"
TRIED = range(2, 9)
DRAWS = 8
Rule = Callable[[np.ndarray], int]


def vectors_of(seed: int, folder: Path) -> dict[str, list[float]]:
    """Site -> its vector, to five decimal places."""
    experiment, model = global_model(seed, folder)
    saved, federation = load_saved(model), simulated_federation(experiment)
    layers, combine, channels = VECTORS[VECTOR]
    plan = plan_of(saved.model, saved.inputs.shape, layers, combine, channels, experiment.seed)
    found = {}
    for name in federation.site_names:
        site = federation.site(name)
        inputs = to_float(site.x[site.train], saved.inputs.mean, saved.inputs.std)
        vector = plan.vector(zero_shares(saved.model, [inputs], layers)[:layers])
        found[name] = [round(float(value), 5) for value in vector]
    return found


def _fit(matrix: np.ndarray, clusters: int) -> KMeans:
    return KMeans(clusters, n_init=10, random_state=0).fit(matrix)  # pyright: ignore[reportArgumentType]


def silhouette(matrix: np.ndarray) -> int:
    """Best mean silhouette: what `clusters: auto` takes."""
    return max(TRIED, key=lambda k: float(silhouette_score(matrix, _fit(matrix, k).labels_)))


def calinski_harabasz(matrix: np.ndarray) -> int:
    """Best ratio of the spread between clusters to that inside them (Calinski and Harabasz 1974)."""
    return max(TRIED, key=lambda k: float(calinski_harabasz_score(matrix, _fit(matrix, k).labels_)))


def _log_inertia(points: np.ndarray, clusters: int) -> float:
    """Logarithm of the sum of squared distances to the nearest centre."""
    inertia = _fit(points, clusters).inertia_
    assert inertia is not None, "a fitted KMeans has it"
    return float(np.log(inertia))


def gap_statistic(matrix: np.ndarray) -> int:
    """The first whose gap is within a deviation of the next (Tibshirani et al. 2001), in principal axes."""
    centred = matrix - matrix.mean(axis=0)
    points = centred @ np.linalg.svd(centred, full_matrices=False)[2].T
    generator = np.random.default_rng(0)
    low, high = points.min(axis=0), points.max(axis=0)
    gaps, deviations = [], []
    for clusters in (1, *TRIED):
        drawn = [_log_inertia(generator.uniform(low, high, points.shape), clusters) for _ in range(DRAWS)]
        gaps.append(np.mean(drawn) - _log_inertia(points, clusters))
        deviations.append(np.std(drawn) * np.sqrt(1 + 1 / DRAWS))
    enough = (k for k in range(1, len(gaps)) if gaps[k - 1] >= gaps[k] - deviations[k])
    return next(enough, max(TRIED))


def eigengap(matrix: np.ndarray) -> int:
    """Widest gap between eigenvalues of the graph's Laplacian; a site's scale: to its third neighbour."""
    distances = np.linalg.norm(matrix[:, None] - matrix[None], axis=2)
    scale = np.sort(distances, axis=1)[:, 3]
    near = np.exp(-(distances**2) / np.outer(scale, scale))
    np.fill_diagonal(near, 0)
    degrees = near.sum(axis=1)
    laplacian = np.eye(len(matrix)) - near / np.sqrt(np.outer(degrees, degrees))
    return int(np.argmax(np.diff(np.sort(np.linalg.eigvalsh(laplacian)))[: max(TRIED)])) + 1


def longest_merge(matrix: np.ndarray) -> int:
    """Largest ratio of the heights of two merges that follow each other, by Ward's method."""
    heights = linkage(matrix, "ward")[:, 2][::-1]
    return int(np.argmax((heights[:-1] / heights[1:])[: max(TRIED) - 1])) + 2


RULES: dict[str, Rule] = {
    "mean silhouette (`clusters: auto`)": silhouette,
    "Calinski and Harabasz": calinski_harabasz,
    "gap statistic": gap_statistic,
    "eigengap": eigengap,
    "longest merge, Ward": longest_merge,
}


def page(record: dict[str, dict[str, list[float]]]) -> str:
    """What each rule finds, seed by seed, and how well k-means with the true number groups the sites."""
    seeds = sorted(record, key=int)
    lines = [
        f"# Which rule finds the {CLUSTERS} groups of synth_groups",
        "",
        "`python -m benchmarks.cluster_numbers`: number of clusters of 16 sites, from the vectors "
        "of the last ReLU layer; seeds that no table has.",
        "",
        f"| rule | {' | '.join(f'seed {seed}' for seed in seeds)} | seeds with {CLUSTERS} |",
        "| --- " * (len(seeds) + 2) + "|",
    ]
    matrices = {seed: np.array([record[seed][site] for site in sorted(record[seed])]) for seed in seeds}
    for label, rule in RULES.items():
        found = [rule(matrices[seed]) for seed in seeds]
        lines.append(f"| {label} | {' | '.join(map(str, found))} | {found.count(CLUSTERS)} |")
    indices = [
        adjusted_rand_score(
            [site.split("-")[1] for site in sorted(record[seed])], _fit(matrices[seed], CLUSTERS).labels_
        )
        for seed in seeds
    ]
    lines.append(
        f"| 100 x adjusted Rand index with {CLUSTERS} | {' | '.join(f'{100 * i:.0f}' for i in indices)} | |"
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every seed that the record lacks, and write the table."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for seed in SEEDS:
        if str(seed) not in record:
            with tempfile.TemporaryDirectory() as folder:
                record[str(seed)] = vectors_of(seed, Path(folder))
            RECORD.write_text(json.dumps(record) + "\n")
    PAGE.write_text(page(record))


if __name__ == "__main__":
    main()
