"""The figures of a finished run, from its metrics.csv, in TensorBoard; any other tracker takes them alike."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path


def figures(run: Path) -> Iterator[tuple[str, float, int]]:
    """(name, value, round) of every number that was measured."""
    with open(run / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("round", "task"):
                    yield name, float(value), int(row["round"])


def main(run: Path) -> None:
    """Write RUN/tensorboard, for `tensorboard --logdir RUN`."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run / "tensorboard")) as writer:
        for name, value, step in figures(run):
            writer.add_scalar(name, value, step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
