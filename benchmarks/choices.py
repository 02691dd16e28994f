"""What settings were chosen from: trials on seeds 11 to 15, on the sites' validation samples.

`python -m benchmarks.choices NAME...` runs what is missing of the named choices, or of all; each
run is a line of results/choices.jsonl, and results/choices.md is written again. No table has these seeds, and
no test sample takes part: in these runs the sites' validation samples stand in for every test set.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.grid import jobs, read_results, run_job
from benchmarks.markdown import cell
from benchmarks.table import RESULTS, Table
from benchmarks.tried_settings import CHOICES
from perennial.config import simulation
from perennial.data.federation import SimulatedFederation, build
from perennial.foundation.errors import ConfigError, nearest

RECORD, PAGE = RESULTS / "choices.jsonl", RESULTS / "choices.md"


@contextmanager
def validation_as_test() -> Iterator[None]:
    """Inside, every simulated federation is tested on its validation samples, at the server and at sites."""

    def built(*arguments: Any) -> SimulatedFederation:
        found = build(*arguments)
        sites = {name: replace(site, test=site.validation) for name, site in found.sites.items()}
        held = torch.cat([site.validation for site in sites.values()]).sort().values
        if not len(held):
            raise ConfigError("data.validation_fraction: the sites hold no validation samples to choose by")
        return replace(found, sites=sites, test=replace(next(iter(sites.values())), test=held))

    simulation.forget_simulated()
    with patch.object(simulation, "build", built):
        yield
    simulation.forget_simulated()


def finished(name: str, table: Table) -> list[dict[str, Any]]:
    """The runs of one choice as its rows are now, under their present labels."""
    found = {run["settings"]: run for run in read_results(RECORD) if run["choice"] == name}
    return [found[job.settings] | {"row": job.row.label} for job in jobs(table) if job.settings in found]


def run(name: str) -> None:
    """Run what is missing of one choice, and keep each run as it is done.

    Raises ConfigError on a name that is no choice.
    """
    if name not in CHOICES:
        raise ConfigError(
            f"no choice {name!r}{nearest(name, CHOICES)}; choices: {', '.join(sorted(CHOICES))}"
        )
    table = CHOICES[name]
    done = {found["settings"] for found in finished(name, table)}
    with validation_as_test():
        for job in jobs(table):
            if job.settings in done:
                continue
            ran = run_job(job.row.file, job.row, job.seed, "cpu")
            line = {
                "choice": name,
                "row": job.row.label,
                "changes": list(job.row.changes),
                "seed": job.seed,
                "settings": job.settings,
                "measures": table.measured(ran.summary),
                "seconds": ran.summary["seconds"],
                "versions": ran.versions,
                "machine": ran.machine,
            }
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, line["row"], job.seed, line["measures"], flush=True)


def page() -> str:
    """What was tried for each choice, and what was taken."""
    lines = [
        "# What settings were chosen from",
        "",
        "`python -m benchmarks.choices`. Seeds 11 to 15, which no table has; measured on the "
        "sites' validation samples, in per cent: mean and half the 95 % t-interval.",
    ]
    for name, table in CHOICES.items():
        runs = finished(name, table)
        if not runs:
            continue
        heads = list(table.measures)
        lines += ["", f"## {table.title}", "", f"`{name}`. {table.note}", ""]
        lines += [f"| | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
        lines += [
            f"| {row.label} | {' | '.join(cell(table, row, head, runs) for head in heads)} |"
            for row in table.rows
        ]
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> None:
    """Run the named choices, or all, and write the page."""
    torch.set_num_threads(1)
    for name in names or CHOICES:
        run(name)
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
