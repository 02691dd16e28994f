"""The demo's learner against plain replay and fine-tuning: 5 sites, 5 tasks of 2 digits, Dirichlet 0.5,
several seeds.

Writes benchmarks/results/learners_digits.json and .md. Run it as `python -m benchmarks.learners_digits`.
"""

import json
import platform
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path

from config.run import RunSettings
from engine.run import run_in_process

EXPERIMENTS = ("quickstart", "replay_digits", "finetune_digits")
SEEDS = (1, 2, 3, 4, 5)
RESULTS = Path(__file__).parent / "results"
MEASURES = ("final_accuracy", "average_incremental_accuracy", "forgetting")


def main() -> None:
    """Run every experiment for every seed and write both files."""
    rows = []
    for name in EXPERIMENTS:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as runs:
                settings = RunSettings(
                    f"experiments/{name}.yaml", f"seed={seed};evaluation.every=task", runs=runs
                )
                summary = run_in_process(settings)
            row = {"experiment": name, "seed": seed} | {measure: summary[measure] for measure in MEASURES}
            print(row, flush=True)
            rows.append(row)
    facts = {
        "program": "python -m benchmarks.learners_digits",
        "versions": {name: version(name) for name in ("flwr", "torch", "numpy")},
        "machine": f"{platform.machine()}, one thread, CPU",
        "rows": rows,
    }
    (RESULTS / "learners_digits.json").write_text(json.dumps(facts, indent=1) + "\n")
    (RESULTS / "learners_digits.md").write_text(table(rows))


def table(rows: list[dict]) -> str:
    """Mean and standard deviation (ddof 1) over seeds, in per cent."""
    lines = [
        f"| experiment ({len(SEEDS)} seeds) | final accuracy | average incremental accuracy | forgetting |",
        "| --- | --- | --- | --- |",
    ]
    for name in EXPERIMENTS:
        cells = []
        for measure in MEASURES:
            values = [100 * row[measure] for row in rows if row["experiment"] == name]
            cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
