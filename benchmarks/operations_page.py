"""What was tried and what a round costs, put into docs/operations.md from the committed results.

python -m benchmarks.operations_page
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.continuity import as_markdown
from benchmarks.deployment_scale import GOAL
from benchmarks.markdown import age
from benchmarks.marked_blocks import with_blocks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operations.md"
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> list[dict[str, Any]]:
    """The objects of a results file; none where nothing has been measured."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def continuity() -> str:
    rows = read("continuity")
    return as_markdown(rows) + where(rows[0]) if rows else "Not measured yet.\n"


def costs() -> str:
    """A table of rounds of nearly no work, what follows for 100 sites, and one sentence for a large model."""
    lines = []
    if scale := read("deployment_scale"):
        lines.append(scale_in_words(scale))
    found = {entry["name"]: entry for entry in read("deployment")}
    if large := found.get("deployment_large_model"):
        old = age([large])
        lines.append(
            f"A model of {large['bytes_down'] / 2 / 1e6:.0f} MB goes to one site and back, trained for a "
            f"moment, in {large['value']} s a round (mean of {len(large['samples'])})."
            + (f" {old}" if old else "")
            + f"\n{where(large)}"
        )
    return "\n".join(lines) or "Not measured yet.\n"


def scale_in_words(rows: list[dict[str, Any]]) -> str:
    """Rounds in which sites have next to nothing to do, by the number of sites."""
    largest = rows[-1]
    used = largest["processor_seconds_per_round"]
    sites, all_used = largest["sites"], largest["sites"] * used["site"] + used["superlink"]
    reached = "is reached" if largest["round_seconds"] < GOAL else "is not reached"
    lines = [
        "Rounds in which sites have next to nothing to do, all processes on one machine; processor time in "
        "seconds of a core, memory with shared pages counted once. The sites share the two cores with the "
        f"SuperLink. The goal, under {GOAL:g} s with 20 sites, {reached} there: at {sites} sites all "
        f"processes together need {all_used:.1f} s of a core in a round, {used['superlink']:.1f} of them the "
        f"SuperLink with the ServerApp, so two cores cannot be faster than {all_used / 2:.1f} s. Other work "
        "ran on the same cores meanwhile, so the seconds are upper bounds:\n",
        "| sites | seconds of a round (median, most) | first round | processor of one site | "
        "of the SuperLink | MB of one site | of the SuperLink |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        used = row["processor_seconds_per_round"]
        lines.append(
            f"| {row['sites']} | {row['round_seconds']}, {max(row['samples'])} | "
            f"{row['first_round_seconds']} | {used['site']} | {used['superlink']} | "
            f"{row['site_megabytes']} | {row['superlink_megabytes']} |"
        )
    each = largest["processor_seconds_per_round"]["superlink"] / largest["sites"]
    lines.append(
        f"\nThe SuperLink and the ServerApp need {each:.2f} s of a core for each site and round at "
        f"{largest['sites']} sites. So with 100 sites on machines of their own, a round takes them about "
        f"{100 * each:.0f} s of processor time and cannot be shorter than most of that, since the SuperLink "
        "is one Python process. This is an estimate: 100 sites were not run.\n"
    )
    return "\n".join(lines) + where(largest)


def where(entry: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in entry["versions"].items())
    return f"\nMeasured on: {entry['machine']}; {versions}.\n"


def rendered(page: str) -> str:
    """The page with both parts between their marks."""
    return with_blocks(page, {"continuity": continuity(), "deployment": costs()})


if __name__ == "__main__":
    (RESULTS / "deployment.md").write_text(costs())
    PAGE.write_text(rendered(PAGE.read_text()))
