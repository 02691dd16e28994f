"""What the cross-site table costs: `python -m benchmarks.cross_site_cost`.

Up to 40 sites, 2,561 features with the constant, 100 classes. Each size runs in a process of its own with one
thread, from the files of sums that a run keeps to what summary.json says, differences by class included, and
its largest resident memory is taken from outside. Records are drawn around class means that all sites share;
in the last size one site's labels are another class's, so that the table is made again without it. Seconds
are of the processor, because wall time depends on what else the machine does; both are kept.
Results: results/cross_site_cost.json and .md.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import machine, versions
from benchmarks.processes import measured
from benchmarks.table import RESULTS
from perennial.foundation.files import replace_file
from perennial.learning.analytic.statistics import Collector, Statistics
from perennial.models.feature_maps.ball import on_grid
from perennial.strategies.statistics.cross_site import block_of
from perennial.strategies.statistics.kept import KeptSums

CLASSES, SAMPLES, SEED = 100, 2_000, 0
SIZES = ((5, 641, 0), (10, 1_025, 0), (10, 2_561, 0), (20, 2_561, 0), (40, 2_561, 0), (40, 2_561, 1))
"""Sites, features with the constant, sites with other labels."""
MODULE = ("-m", "benchmarks.cross_site_cost")
MOST_SECONDS, MOST_MIB = 360, 2_000_000 // 1024
"""What the specification allows 40 sites."""


def drawn_sums(site: int, width: int, shifted: bool) -> Statistics:
    """One site's sums. shifted: each class is called by the next one's label."""
    means = torch.randn(CLASSES, width - 1, generator=torch.Generator().manual_seed(SEED))
    generator = torch.Generator().manual_seed(1 + site)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, width - 1, generator=generator)
    collector = Collector(width - 1, range(CLASSES))
    features = on_grid((0.3 * means[labels] + noise).relu())
    collector.add(features, (labels + 1) % CLASSES if shifted else labels)
    return collector.finish()


def make(folder: Path, sites: int, width: int, shifted: int) -> dict[str, float]:
    """Write the sums of all sites as a run keeps them."""
    kept = KeptSums(folder)
    for site in range(sites):
        kept.add(1, [f"site-{site:02d}"], drawn_sums(site, width, site < shifted))
    return {}


def table(folder: Path) -> dict[str, Any]:
    """The table of these sums: seconds of the processor and of the wall, and whom it marks."""
    torch.set_num_threads(1)
    given = KeptSums(folder)
    given.contributions = {1: {path.name.partition("-task-")[0]: {} for path in sorted(folder.iterdir())}}
    kept = given.until(1)
    start, began = time.process_time(), time.perf_counter()
    block = block_of(kept, range(CLASSES))
    rows = block["sites"].values()
    return {
        "processor": round(time.process_time() - start, 1),
        "wall": round(time.perf_counter() - began, 1),
        "features solved on": block["features"],
        "judged": sum(row["skill"] is not None for row in rows),
        "marked": sum(row["marked"] is not None for row in rows),
    }


def page(result: dict[str, Any]) -> str:
    heads = (
        "sites",
        "features",
        "other labels",
        "solved on",
        "processor, s",
        "wall, s",
        "peak MiB",
        "marked",
    )
    names = ("features solved on", "processor", "wall", "peak MiB", "marked")
    lines = [
        f"| {run['sites']} | {run['features with the constant']:,} | {run['with other labels']} | "
        + " | ".join(f"{run[name]:,}" for name in names)
        + " |"
        for run in result["runs"]
    ]
    return "\n".join(
        [
            "# What the cross-site table costs",
            "",
            f"`{'python ' + ' '.join(MODULE)}`: {CLASSES} classes, {SAMPLES:,} drawn records a site (seed "
            f"{SEED}), one thread, from the kept files of sums to the block of `summary.json`. A site that "
            "is marked costs one more table, without it. The bound for 40 sites is "
            f"{MOST_SECONDS} s and {MOST_MIB:,} MiB. Wall time is longer where other programs share the "
            "processor.",
            "",
            f"| {' | '.join(heads)} |",
            f"|{' ---: |' * len(heads)}",
            *lines,
            "",
            f"Versions: {result['versions']}. Machine: {result['machine']}.",
            "",
        ]
    )


def main() -> None:
    """Measure every size, the smallest first, and write the results after each."""
    runs: list[dict[str, Any]] = []
    for sites, width, shifted in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            measured(*MODULE, "make", folder, str(sites), str(width), str(shifted))
            ended = measured(*MODULE, "table", folder)
        facts = {"sites": sites, "features with the constant": width, "with other labels": shifted}
        runs.append(facts | ended.found | {"peak MiB": round(ended.peak_kib / 1024)})
        print(runs[-1], flush=True)
        result = {
            "classes": CLASSES,
            "samples a site": SAMPLES,
            "seed": SEED,
            "threads": 1,
            "allowed for 40 sites": {"seconds": MOST_SECONDS, "MiB": MOST_MIB},
            "runs": runs,
            "versions": versions(("torch", "numpy", "scipy")),
            "machine": machine(),
        }
        content = (json.dumps(result, indent=1) + "\n").encode()
        replace_file(RESULTS / "cross_site_cost.json", content, mode=0o644)
        replace_file(RESULTS / "cross_site_cost.md", page(result).encode(), mode=0o644)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder, *numbers]:
            print(json.dumps(make(Path(folder), *map(int, numbers))))
        case ["table", folder]:
            print(json.dumps(table(Path(folder))))
        case _:
            main()
