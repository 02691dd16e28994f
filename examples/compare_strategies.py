"""Four strategies on one experiment, three seeds each: mean and standard deviation of the final accuracy."""

import statistics
import sys
import tempfile
from pathlib import Path

from perennial import Experiment, run

STRATEGIES = ["fedavg", "scaffold", "fednova", "multi_factor"]
SEEDS = [1, 2, 3]
EXPERIMENT = {
    "name": "compared",
    "data": {
        "source": "digits",
        "sites": 4,
        "samples_limit": 600,
        "partition": {"kind": "dirichlet", "alpha": 0.3},
    },
    "tasks": {"increments": [10], "rounds": 4},
    "model": {"name": "mlp", "hidden": [32]},
    "learner": {"preset": "none", "epochs": 2, "optimizer": {"lr": 0.1}},
}


def main(folder: Path) -> None:
    """Run every strategy with every seed, and print a table."""
    experiment = Experiment.model_validate(EXPERIMENT)
    for strategy in STRATEGIES:
        found = []
        for seed in SEEDS:
            result = run(
                experiment,
                overrides=[f"strategy={strategy}"],
                seed=seed,
                name=f"{strategy}-{seed}",
                runs=folder / "runs",
            )
            found.append(100 * result.summary["final_accuracy"])
        print(f"{strategy:14s} {statistics.mean(found):5.1f} ± {statistics.stdev(found):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
