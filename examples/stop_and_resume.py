"""A run that stops half-way goes on where it was, and ends at the bits of one that never stopped."""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perennial import Callback, Experiment, run

EXPERIMENT = {
    "name": "stopped",
    "seed": 5,
    "data": {"source": "digits", "sites": 3, "samples_limit": 400, "partition": {"kind": "iid"}},
    "tasks": {"count": 5, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}, "memory": {"per_class": 3}},
}


class PowerCut(Callback):
    """A callback hears of every round."""

    def on_round(self, entry: Mapping[str, Any]) -> None:
        if entry["round"] == 5:
            raise KeyboardInterrupt


def main(folder: Path) -> None:
    """Run once without a stop, once with one, and compare the models."""
    experiment, runs = Experiment.model_validate(EXPERIMENT), folder / "runs"
    whole = run(experiment, name="whole", runs=runs)
    try:
        run(experiment, name="halved", runs=runs, callbacks=[PowerCut()])
    except KeyboardInterrupt:
        print("stopped in round 5")
    resumed = run(resume=runs / "halved")
    print("without a stop:", whole.summary["model_sha256"])
    print("with a stop:   ", resumed.summary["model_sha256"])
    assert whole.summary["model_sha256"] == resumed.summary["model_sha256"]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
