"""The table of simulators in Markdown, and whether the engine is the fastest of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import age

RESULTS = Path(__file__).resolve().parents[1] / "results" / "peers.jsonl"
MARKDOWN = RESULTS.with_suffix(".md")
OURS = "Perennial, "
HEAD = """# Simulators side by side

`python -m benchmarks.peers`. Medians; each run is a process of its own with one PyTorch thread a
process, in turns. Whole: start to exit, imports and all. Memory: of all processes of a run, shared pages
counted once. Every run of a workload does the same number of local steps with the same network from the
same first values on the same division of the digits, within 1 % in W2: which sites a round takes, and the
order of samples, are each simulator's own. Other simulators read prepared arrays where the engine and the
plain loop read the data set itself, and they write no checkpoint, journal or report, which the engine does.
"""


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The stored lines."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def as_markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """One table for each workload, the verdict below, and where it was measured."""
    lines = [HEAD, *([old, ""] if (old := age(entries)) else [])]
    for workload in sorted({entry["workload"] for entry in entries}):
        mine = [entry for entry in entries if entry["workload"] == workload]
        lines += [
            f"## {workload.upper()}, {mine[0]['steps']} local steps",
            "",
            "| | whole, s | rounds, s | peak memory, MiB | accuracy, % | runs |",
            "| --- | --- | --- | --- | --- | --- |",
            *map(_line, mine),
            "",
            *(
                verdict(mine, "whole_seconds", "start to exit"),
                verdict(mine, "rounds_seconds", "rounds alone"),
            ),
            "",
        ]
    places = sorted({entry["machine"] for entry in entries})
    packages = sorted({f"{name} {number}" for entry in entries for name, number in entry["versions"].items()})
    load = max(entry["load_before"] for entry in entries)
    lines.append(
        f"Measured on: {'; '.join(places)}; {', '.join(packages)}; load before a workload {load} at most."
    )
    return "\n".join(lines) + "\n"


def verdict(entries: Sequence[Mapping[str, Any]], key: str, what: str) -> str:
    """Whether the engine, with each number of workers, is below every other simulator."""
    ours = [entry for entry in entries if entry["peer"].startswith(OURS)]
    others = [entry for entry in entries if entry["simulator"] and entry not in ours]
    if not ours or not others:
        return f"- {what}: nothing to compare with."
    best = min(others, key=lambda entry: entry[key])
    words = []
    for entry in ours:
        faster = "faster" if entry[key] < best[key] else "NOT faster"
        words.append(f"{entry['peer'].removeprefix(OURS)}: {faster} ({entry[key] / best[key]:.2f} times)")
    return f"- {what}, against the fastest other simulator, {best['peer']}: {'; '.join(words)}."


def _line(entry: Mapping[str, Any]) -> str:
    cells = (
        entry["peer"],
        f"{entry['whole_seconds']:.1f}",
        f"{entry['rounds_seconds']:.1f}",
        f"{entry['peak_mib']:.0f}",
        f"{100 * entry['accuracy']:.1f}",
        str(len(entry["samples"]["whole_seconds"])),
    )
    return f"| {' | '.join(cells)} |"
