"""The picture of `perennial check` in docs/your_data.md: `python -m benchmarks.check_picture`."""

import csv
import io
import re
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.table import ROOT
from perennial.cli import check
from perennial.cli.init import init_command
from perennial.config.experiment import load_experiment


def main() -> None:
    """Write docs/check.svg, of a table that is made up."""
    generator = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "heart.csv"
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["hospital", "Patient-Nr", "age", "chol", "thal", "days", "diagnosis"])
            for row in range(400):
                ill = row % 5 < 2
                age, chol = generator.normal(58 + 5 * ill, 9), generator.normal(230 + 20 * ill, 40)
                shown = "-999" if row % 31 == 0 else f"{chol:.0f}"
                days = generator.integers(5, 40) if ill else generator.integers(300, 900)
                cells = [
                    f"{age:.0f}",
                    shown,
                    generator.choice(["3", "6", "7"]),
                    days,
                    ["healthy", "ill"][ill],
                ]
                out.writerow([["graz", "linz"][row % 3 == 0], 4000 + row // 2, *cells])
        init_command(path, Path(place), "")
        console = Console(record=True, width=110, highlight=False, markup=False, file=io.StringIO())
        check._check_experiment(console, load_experiment(Path(place) / "experiment.yaml"))
        drawn = console.export_svg(title="perennial check heart/experiment.yaml")
    # a page loads nothing from anywhere: the reader's own font will do
    (ROOT / "docs" / "check.svg").write_text(re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


if __name__ == "__main__":
    main()
