"""The attack table: what a hostile server got back, by channel and policy.

`python -m benchmarks.attack_table` runs every attack and writes results/attack_table.json and .md.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.attacked_hospital import BASE, POLICIES
from benchmarks.hostile_server import ATTACKS, attacked
from perennial.client.exposure import channels
from perennial.config.site import SitePolicy
from perennial.foundation.files import replace_file

RESULTS = Path(__file__).parent / "results" / "attack_table"
HEAD = """# What a hostile server recovers, by channel and policy

`python -m benchmarks.attack_table`, seed {seed} of data and model, scikit-learn's digits (8 x 8),
one site of {sites}. Each attack runs against a real ClientApp that has approved the experiment which the
attack needs, so that the policy alone stands in the way. An image counts as recovered when the
reconstruction correlates with it by more than 0.98; of digests, when the sample's features came back. A cell
with a rule was refused by it. A failed attack proves no safety: the programs are in
`benchmarks/hostile_server.py`.

| policy | what it says |
| --- | --- |
"""


def main() -> None:
    """Run all attacks under all policies and write both files."""
    rows = [row(name, policy) for policy in POLICIES for name in ATTACKS]
    replace_file(RESULTS.with_suffix(".json"), (json.dumps(rows, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), page(rows).encode(), mode=0o644)


def row(name: str, policy: str) -> dict[str, Any]:
    """One attack under one policy. claimed: whether the policy is said to let single images out there."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = attacked(name, policy, Path(folder))
    return {
        "policy": policy,
        "attack": name,
        "channel": ATTACKS[name].channel,
        "recovered": outcome.recovered,
        "of": outcome.of,
        "refusal": outcome.refusal,
    }


def page(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [HEAD.format(seed=BASE["seed"], sites=BASE["data"]["sites"]).rstrip("\n")]
    for policy, settings in POLICIES.items():
        open_ways = [c.name for c in channels(SitePolicy.model_validate(settings)) if c.recovers]
        says = ", ".join(f"{key}: {value}" for key, value in settings.items() if key in SHOWN)
        lines.append(f"| {policy} | {says}; `perennial site check`: {', '.join(open_ways) or 'no channel'} |")
    lines += ["", f"| attack | {' | '.join(POLICIES)} |", f"| --- |{' --- |' * len(POLICIES)}"]
    found = {(entry["policy"], entry["attack"]): entry for entry in rows}
    for name in ATTACKS:
        cells = [_cell(found[policy, name]) for policy in POLICIES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


SHOWN = ("answers", "min_samples", "below_floor", "require_privacy", "max_epsilon")
"""Keys of a policy that decide most."""


def _cell(entry: dict[str, Any]) -> str:
    count = f"{entry['recovered']} of {entry['of']}"
    if not entry["refusal"]:
        return count
    return f"{count}: {entry['refusal'].split(': ')[1]}"


if __name__ == "__main__":
    main()
