"""Four strategies on one experiment, three seeds each: means and 95 % intervals."""

import sys
import tempfile
from pathlib import Path

from perennial import run_sweep

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
    """Run every strategy with every seed in parallel processes, and print one table."""
    print(run_sweep(EXPERIMENT, seeds=SEEDS, sweep={"strategy": STRATEGIES}, runs=folder / "runs"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
