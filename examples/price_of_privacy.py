"""What noise costs: epsilon is known before a run, accuracy after it."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from perennial import Experiment, run
from perennial.privacy.accountants import make_accountant

ROUNDS, DELTA = 6, 1e-3
EXPERIMENT: dict[str, Any] = {
    "name": "priced",
    "seed": 3,
    "data": {"source": "digits", "sites": 20, "partition": {"kind": "iid"}},
    "tasks": {"increments": [10], "rounds": ROUNDS},
    "model": {"name": "mlp", "hidden": [32]},
    "learner": {"preset": "none", "epochs": 3, "optimizer": {"lr": 0.1}},
    "evaluation": {"federated": False},
}


def main(folder: Path) -> None:
    """Print epsilon and accuracy for three amounts of noise on the sum of the sites' updates."""
    for noise in (0.0, 1.0, 4.0):
        experiment, planned = EXPERIMENT, 0.0
        if noise:
            privacy = {"mode": "client_central", "clip_norm": 1.0, "noise_multiplier": noise, "delta": DELTA}
            experiment = EXPERIMENT | {"privacy": privacy}
            # every round releases one sum, in which the contribution of one site is hidden
            planned = make_accountant("prv", [(noise, 1.0, ROUNDS)]).epsilon(DELTA)
        result = run(Experiment.model_validate(experiment), name=f"noise-{noise:g}", runs=folder / "runs")
        cost = f"epsilon {planned:6.2f} at delta {DELTA:g}" if noise else "no protection"
        print(f"noise multiplier {noise:g}: {cost}, accuracy {result.summary['final_accuracy']:.1%}")
        if noise:
            print(f"    the run's own account: {result.summary['epsilon']['value']:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
