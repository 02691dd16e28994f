"""Three hospitals with a table: numbers, a category, and a diagnosis that only one of them has seen."""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np

from perennial import Experiment, run

# mean age, mean marker, the hospitals that have seen it
DIAGNOSES = {
    "healthy": (40, 1.0, "abc"),
    "mild": (55, 2.0, "abc"),
    "severe": (70, 3.5, "ab"),
    "rare": (30, 4.5, "c"),
}


def write_table(path: Path) -> None:
    """One row a patient: hospital, age, marker, smoker, diagnosis."""
    draw = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "age", "marker", "smoker", "diagnosis"])
        for diagnosis, (age, marker, hospitals) in DIAGNOSES.items():
            for number in range(60 * len(hospitals)):
                hospital = f"hospital-{hospitals[number % len(hospitals)]}"
                smoker = draw.choice(["yes", "no", "unknown"])
                table.writerow(
                    [
                        hospital,
                        f"{draw.normal(age, 5):.1f}",
                        f"{draw.normal(marker, 0.4):.2f}",
                        smoker,
                        diagnosis,
                    ]
                )


def main(folder: Path) -> None:
    """Write the table, train on it in two tasks, and print the accuracy of each class."""
    write_table(folder / "patients.csv")
    experiment = {
        "name": "hospitals",
        "seed": 1,
        "data": {
            "source": "csv",
            "path": str(folder / "patients.csv"),
            "label_column": "diagnosis",
            "site_column": "hospital",
            "columns": {"age": "numeric", "marker": "numeric", "smoker": ["yes", "no", "unknown"]},
            # public knowledge, not computed from anybody's patients
            "normalise": {"mean": {"age": 50.0, "marker": 2.5}, "std": {"age": 15.0, "marker": 1.2}},
            "partition": {"kind": "natural"},
        },
        "tasks": {"count": 2, "rounds": 6},
        "model": {"name": "mlp", "hidden": [16]},
        "learner": {
            "preset": "none",
            "epochs": 5,
            "optimizer": {"lr": 0.1, "momentum": 0.9},
            "classification": "balanced_softmax",
            "memory": {"per_class": 10},
        },
    }
    summary = run(Experiment.model_validate(experiment), runs=folder / "runs").summary
    print("sites:", ", ".join(summary["sites"]))
    print("tasks:", summary["tasks"])
    print(f"accuracy over all classes after the last task: {summary['final_accuracy']:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
