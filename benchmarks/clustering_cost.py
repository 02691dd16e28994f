"""What grouping costs the server: 200 sparsity vectors of 32 entries, by each rule.

`python -m benchmarks.clustering_cost [OUTPUT]` groups vectors around 4 centres, each rule in turn,
and writes the medians of the processor's seconds to benchmarks/results/clustering_cost.json (or OUTPUT).
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from perennial.foundation.streams import stream
from perennial.strategies.clusters.clustering import Labels, Vectors, adjusted_rand, by_threshold, k_means

SITES, ENTRIES, GROUPS, SPREAD, REPEATS = 200, 32, 4, 0.05, 5
RULES: dict[str, Callable[[Vectors], Labels]] = {
    "k-means, 4 clusters": lambda vectors: k_means(vectors, GROUPS, seed=1),
    "k-means, number of clusters found": lambda vectors: k_means(vectors, "auto", seed=1),
    "threshold of distances": by_threshold,
}


def vectors(repeat: int) -> tuple[Vectors, Labels]:
    """(vectors, groups that they were made of) of all sites, in [0, 1]."""
    generator = stream(1, "clustering-cost", repeat)
    middles = generator.random((GROUPS, ENTRIES))
    truth = {f"site-{number:03}": number % GROUPS for number in range(SITES)}
    noise = SPREAD * generator.standard_normal((SITES, ENTRIES))
    rows = np.clip(middles[list(truth.values())] + noise, 0, 1)
    return dict(zip(truth, rows, strict=True)), truth


def main(output: Path) -> None:
    """Measure, alternating between the rules, and write the medians."""
    seconds: dict[str, list[float]] = {label: [] for label in RULES}
    agreement: dict[str, list[float]] = {label: [] for label in RULES}
    with threadpool_limits(1):
        k_means(vectors(0)[0], 2, seed=1)  # imports scikit-learn
        for repeat in range(1, REPEATS + 1):
            for label, rule in RULES.items():
                some, truth = vectors(repeat)
                start = time.process_time()
                found = rule(some)
                seconds[label].append(time.process_time() - start)
                agreement[label].append(adjusted_rand(found, truth) or 0.0)
    result = {
        "sites": SITES,
        "entries": ENTRIES,
        "groups": GROUPS,
        "repeats": REPEATS,
        "seconds": {label: round(statistics.median(values), 3) for label, values in seconds.items()},
        "longest": {label: round(max(values), 3) for label, values in seconds.items()},
        "adjusted Rand index": {label: round(min(values), 3) for label, values in agreement.items()},
        "machine": f"{platform.machine()}, processor seconds, one thread",
    }
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    default = Path(__file__).resolve().parent / "results" / "clustering_cost.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
