"""Each hospital on its own patients: its own head, the federated one, and the personal one that it keeps.

    python -m benchmarks.own_heads DATA [OUTPUT]

DATA holds heart_disease_4_hospitals.csv (five seeds) and ham10000_32.webp.zip (three, 4,000 images). The bar:
personal less the better of own and federated, over all site-seeds, has a lower 95 % limit above -1.5 points
of accuracy; single sites are judged from 100 test records on. The better of two is taken with hindsight of
the test records, which no choice can reach.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.first_table import ILL
from perennial.library import run

HEADS = ("own", "federated", "personal")


def experiments(data: Path) -> dict[str, tuple[range, dict[str, Any]]]:
    """Name -> (seeds, what differs from other experiments)."""
    heart = {
        **{"source": "csv", "path": str(data / "heart_disease_4_hospitals.csv"), "label_column": "diagnosis"},
        **{"labels": ILL, "site_column": "hospital", "test_fraction": 0.3, "validation_fraction": 0.3},
        "column_kinds": dict.fromkeys(("cp", "restecg", "slope", "thal"), "category"),
    }
    ham = {"source": "pack", "path": str(data / "ham10000_32.webp.zip"), "samples_limit": 4000}
    patches = [{"name": "patches", "filters": 100, "size": 8, "power": 0.5}]
    return {
        "heart disease": (range(1, 6), {"data": heart, "model": {"name": "features", "features": "auto"}}),
        "HAM10000": (range(1, 4), {"data": ham, "model": {"name": "features", "features": patches}}),
    }


def main(data: Path, output: Path) -> None:
    """Measure all hospitals and write a page."""
    lines = [
        "# Each hospital on its own patients",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split()),
        "",
    ]
    lines += [
        "| data, seed | hospital | test records | own | federated | personal | balanced: own | federated "
    ]
    lines[-1] += "| personal | lambda |"
    lines += ["|---|---|" + "---:|" * 8]
    differences, single = list[float](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, (seeds, block) in experiments(data).items():
            for seed in seeds:
                content = {"name": "own", "seed": seed, "tasks": {"count": 1, "rounds": 1}, **block}
                content["data"] = block["data"] | {"partition": {"kind": "natural"}}
                content["strategy"] = {"name": "analytic", "head": "auto"}
                done = run(content, runs=folder, name=f"{name.replace(' ', '-')}-{seed}")
                for site, each in done.summary["own_heads"].items():
                    row, plain = _row(each)
                    lines.append(f"| {name}, {seed} | {site} | {sum(each['total'])} | {row} |")
                    differences.append(plain[2] - max(plain[:2]))
                    if sum(each["total"]) >= 100 and differences[-1] < -1.5:
                        single.append(f"{site} ({name}, seed {seed}: {differences[-1]:.1f})")
                print(name, seed, np.mean(differences), flush=True)
                output.write_text("\n".join([*lines, "", *_verdict(differences, single), ""]))


def _row(each: dict[str, Any]) -> tuple[str, list[float]]:
    """(cells of a site's row, accuracy of each head in points)."""
    total = np.array(each["total"])
    right = {head: np.array(each["right"][head]) for head in HEADS}
    plain = [100 * right[head].sum() / total.sum() for head in HEADS]
    balanced = [100 * np.mean(right[head][total > 0] / total[total > 0]) for head in HEADS]
    chosen = "federated" if each["lambda"] is None else f"{each['lambda']:g}"
    return " | ".join([*(f"{value:.1f}" for value in (*plain, *balanced)), chosen]), plain


def _verdict(differences: list[float], single: list[str]) -> list[str]:
    mean = float(np.mean(differences))
    error = float(np.std(differences, ddof=1) / np.sqrt(len(differences))) if differences[1:] else 0.0
    low, high = mean - 1.96 * error, mean + 1.96 * error
    met = "met" if low > -1.5 and len(differences) >= 30 else "MISSED"
    found = f"Personal less the better of own and federated, {len(differences)} site-seeds: {mean:.2f} points"
    of_large = f"below -1.5 points: {', '.join(single)}" if single else "none is below -1.5 points"
    return [
        f"{found}, 95 % interval {low:.2f} to {high:.2f}: {met}.",
        "",
        f"From 100 records on, {of_large}.",
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "benchmarks/results/own_heads.md"))
