"""Holds what `site check` says of 500 drawn policies against attacks.

`python -m benchmarks.statements` runs every attack that privacy/exposure_table.py names once, in
the cell that names it, and for each fifth of 500 drawn policies one drawn attack for real; it writes
results/statements.json and .md. A "no" is false where an attack recovers an image.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.attack_cells import ATTACKS, MASKED, PEER, cells, run, tried
from benchmarks.environment import versions
from perennial.client.exposure import channels
from perennial.config.site import ANSWERS, SitePolicy
from perennial.foundation.errors import PerennialError
from perennial.foundation.files import replace_file
from perennial.privacy.exposure_table import ADVERSARIES, PROTECTIONS, TABLE

RESULTS = Path(__file__).parent / "results" / "statements"
SEED, DRAWS, EVERY = 34, 500, 5
"""Policies that are drawn; of so many, one meets its attack for real."""
DEMANDS = (
    *("none", "none", "client_local", "client_central", "client_shared"),
    *("sample", "sample_shared", "patient"),
)
CHANNEL = {
    "update": "updates",
    "run config": "updates",
    "class means": "sums for class means",
    "counts": "counts of right answers",
    "digests": "digests",
    "sparsity": "sparsity vectors",
    "prototypes": "gradients of prototypes",
    "features": "sums of features",
}
"""A word in an attack's name -> the channel that it goes through."""
SLOW = ("counts, pixel by pixel", "weakly noised counts, pixel by pixel")
"""Hundreds of questions each; run once in their cells, and not for drawn policies."""


def drawn(number: int) -> tuple[dict[str, Any], str]:
    """A policy and the name of an attack on it."""
    draw = random.Random(f"{SEED} {number}")
    demand = draw.choice(DEMANDS)
    budget = draw.choice((1.0, 8.0, 10.0, 100.0, 1e6))
    policy: dict[str, Any] = {
        "answers": [answer for answer in ANSWERS if draw.random() < 0.75],
        "min_samples": draw.choice((1, 5, 20)),
        "below_floor": [name for name in ("prototypes", "digest", "class_means") if draw.random() < 0.3],
        "require_privacy": demand,
        "max_epsilon": budget if demand != "none" or draw.random() < 0.3 else None,
        "delta": draw.choice((1e-5, 1e-4, 1e-2)),
        "max_evaluations": draw.choice((None, 3, 20, 1000)),
        "require_secure": draw.random() < 0.25,
        "peers": PEER if draw.random() < 0.5 else {},
        "max_repeats": draw.choice((0, 3, 1000)),
    }
    return policy, draw.choice(sorted(name for name in ATTACKS if name not in SLOW))


def channel_of(attack: str) -> str:
    """The channel of an attack."""
    found = [channel for word, channel in CHANNEL.items() if word in attack]
    return found[0] if found else "updates"


def looked_up(policy: dict[str, Any], shown: dict[tuple[str, str], bool]) -> list[str]:
    """False words of a policy, by the attacks that were run in its cells.

    shown: by channel and protection.
    """
    found = []
    for channel in channels(SitePolicy.model_validate(policy)):
        if not channel.recovers and shown[channel.name, channel.cell.protection]:
            found.append(str(channel))
    return found


def attacked(policy: dict[str, Any], attack: str, folder: Path) -> dict[str, Any]:
    """One drawn attack on a drawn policy, for real."""
    recovers = {channel.name: channel.recovers for channel in channels(SitePolicy.model_validate(policy))}
    try:
        outcome = run(attack, policy, folder, "clear")
        recovered, refusal = outcome.recovered, outcome.refusal
    except PerennialError as error:
        recovered, refusal = 0, str(error)
    claimed = recovers[channel_of(attack)]
    return {
        "attack": attack,
        "claimed": claimed,
        "recovered": recovered,
        "refused": bool(refusal),
        "false": recovered > 0 and not claimed,
    }


def shown_in(rows: list[dict[str, Any]]) -> dict[tuple[str, str], bool]:
    """Whether a lying server recovered anything, by channel and protection."""
    found = dict.fromkeys(((cell.channel, cell.protection) for cell in TABLE.values()), False)
    for row in rows:
        if row["adversary"] == ADVERSARIES[0]:
            found[row["channel"], row["protection"]] |= row["recovered"] > 0
    return found


def _recovered(row: dict[str, Any]) -> bool:
    return row["recovered"] > 0


def _refused(row: dict[str, Any]) -> bool:
    return row["refused"]


def _false(row: dict[str, Any]) -> bool:
    return row["false"]


def page(content: dict[str, Any]) -> str:
    """The results as Markdown."""
    used = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    draws = content["draws"]
    got, refused, false = (sum(map(of, draws)) for of in (_recovered, _refused, _false))
    lines = [
        "# Statements of protection against attacks",
        "",
        f"`python -m benchmarks.statements`, seed {content['seed']}; {used}.",
        f"{DRAWS} policies were drawn. Run: every attack that the table names, in its cell, and for",
        f"{len(draws)} of the policies one drawn attack, on a real ClientApp (digits). Looked up: all",
        "channels of all drawn policies, in the cells that they fall into.",
        f"Of the {len(draws)} policies {got} gave images to their attack, and {refused} refused it.",
        f"**A no that was false: {false} run, {content['false_looked_up']} looked up.**",
        "",
        "| channel | protection | adversary | attack | says | recovered |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['channel']} | {row['protection']} | {row['adversary']} | {row['attack']} | "
        f"{'YES' if row['claimed'] else 'no'} | {row['recovered']} of {row['of']} |"
        for row in content["cells"]
    ]
    lines += ["", *(f"- {name}: {words}" for name, words in PROTECTIONS.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, look up, and write both files."""
    rows: list[dict[str, Any]] = []
    known: dict[tuple[str, str, str], tuple[int, int, str]] = {}
    for cell, adversary in cells():
        name = cell.attacks[ADVERSARIES.index(adversary)]
        # masked sums are the same whatever the policy of the cell; another site's look depends on it
        key = (name, "" if name in MASKED else cell.protection, "" if name in MASKED else cell.channel)
        if key not in known:
            with tempfile.TemporaryDirectory() as folder:
                outcome = tried(cell, adversary, Path(folder) / "site")
            known[key] = outcome.recovered, outcome.of, outcome.refusal
        recovered, of, refusal = known[key]
        claimed = cell.images[ADVERSARIES.index(adversary)]
        rows.append(
            {"channel": cell.channel, "protection": cell.protection, "adversary": adversary, "attack": name}
            | {"claimed": claimed, "recovered": recovered, "of": of, "refusal": refusal}
        )
    draws, shown, false = [], shown_in(rows), 0
    for number in range(DRAWS):
        policy, attack = drawn(number)
        if number % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                draws.append(attacked(policy, attack, Path(folder) / "site"))
        false += len(looked_up(policy, shown))
    content = {"seed": SEED, "versions": versions(), "cells": rows, "draws": draws, "false_looked_up": false}
    replace_file(RESULTS.with_suffix(".json"), (json.dumps(content, indent=1) + "\n").encode(), mode=0o644)
    replace_file(RESULTS.with_suffix(".md"), page(content).encode(), mode=0o644)


if __name__ == "__main__":
    main()
