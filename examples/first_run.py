"""Five sites learn ten digits in five tasks of two classes; replay keeps what was learnt first."""

import sys
import tempfile
from pathlib import Path

from perennial import Experiment, run

EXPERIMENT = {
    "name": "first-run",
    "seed": 1,
    "data": {"source": "digits", "sites": 5, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "tasks": {"count": 5, "rounds": 3},
    "model": {"name": "mlp", "hidden": [64]},
    "learner": {
        "preset": "none",
        "optimizer": {"lr": 0.1, "momentum": 0.9},
        "classification": "balanced_softmax",
        "memory": {"per_class": 4},
    },
    "strategy": "fedavg",
}


def main(folder: Path) -> None:
    """Run the experiment below folder, and print what it learnt and forgot."""
    # the same keys as in an experiment.yaml, of which run() takes the path as well
    result = run(Experiment.model_validate(EXPERIMENT), runs=folder / "runs")

    print("Accuracy on the classes of each task (columns) after each task (rows), per cent:")
    for task, row in enumerate(result.accuracy_matrix, start=1):
        print("  ".join(f"{100 * accuracy:5.1f}" for accuracy in row[:task]))
    summary = result.summary
    print(f"final accuracy {summary['final_accuracy']:.1%}, forgetting {summary['forgetting']:.1%}")
    print(f"the report: {result.folder / 'report.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
