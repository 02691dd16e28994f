"""Five sites learn ten digits in five tasks of two classes; replay keeps what was learnt first."""

import json
import sys
import tempfile
from pathlib import Path

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process

EXPERIMENT = {
    "name": "first-run",
    "seed": 1,
    "data": {"source": "digits", "sites": 5, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "tasks": {"count": 5, "rounds": 3},
    "model": {"name": "mlp", "hidden": [64]},
    "learner": {
        "optimizer": {"lr": 0.1, "momentum": 0.9},
        "classification": "balanced_softmax",
        "memory": {"per_class": 4},
    },
    "strategy": "fedavg",
}


def main(folder: Path) -> None:
    """Run the experiment below folder, and print what it learnt and forgot."""
    path = folder / "first_run.yaml"
    # YAML is a superset of JSON, so an experiment can be written as either
    path.write_text(json.dumps(EXPERIMENT))
    summary = run_in_process(RunSettings(str(path), runs=str(folder / "runs")))

    print("Accuracy on the classes of each task (columns) after each task (rows), per cent:")
    matrix = summary["accuracy_matrix"]
    assert isinstance(matrix, list)
    for row in matrix:
        print("  ".join(f"{100 * accuracy:5.1f}" for accuracy in row))
    print(f"final accuracy {summary['final_accuracy']:.1%}, forgetting {summary['forgetting']:.1%}")
    print(f"the report: {folder / 'runs' / 'first-run' / 'report.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
