"""What was tried and what a round costs, put into docs/operations.md from the committed results.

python -m perennial.benchmarks.operations_page
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perennial.benchmarks.continuity import as_markdown
from perennial.benchmarks.markdown import age

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
    """One sentence for each measurement."""
    found = {entry["name"]: entry for entry in read("deployment")}
    lines = []
    if idle := found.get("deployment_seconds_per_idle_round"):
        lines.append(
            "A round in which sites have next to nothing to do takes "
            f"{idle['value']} ± {idle['deviation']} s ({len(idle['samples'])} rounds, two sites): a "
            "SuperNode looks for messages every 3 s, and starts a process for each.\n"
        )
    if large := found.get("deployment_large_model"):
        lines.append(
            f"A model of {large['bytes_down'] / 2 / 1e6:.0f} MB goes to one site and back, trained for a "
            f"moment, in {large['value']} s a round (mean of {len(large['samples'])}).\n"
        )
    if not lines:
        return "Not measured yet.\n"
    if old := age(list(found.values())):
        lines.insert(0, f"{old}\n")
    return "\n".join(lines) + "\n" + where(next(iter(found.values())))


def where(entry: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in entry["versions"].items())
    return f"\nMeasured on: {entry['machine']}; {versions}.\n"


def rendered(page: str) -> str:
    """The page with both parts between their marks."""
    for mark, text in (("continuity", continuity()), ("deployment", costs())):
        before, _, rest = page.partition(f"<!-- {mark} -->")
        _, end, after = rest.partition(f"<!-- end of {mark} -->")
        if not end:
            raise ValueError(f"{PAGE}: needs <!-- {mark} --> and <!-- end of {mark} -->")
        page = f"{before}<!-- {mark} -->\n\n{text}\n<!-- end of {mark} -->{after}"
    return page


if __name__ == "__main__":
    (RESULTS / "deployment.md").write_text(costs())
    PAGE.write_text(rendered(PAGE.read_text()))
