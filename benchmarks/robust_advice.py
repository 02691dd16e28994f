"""Which rule withstands what, in docs/threat_model.md, from the committed tables of adaptive attackers.

`python -m benchmarks.recommendation` writes it, between the page's marks.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from textwrap import fill
from typing import Any

from benchmarks.intervals import half_width
from benchmarks.tables.robust import DIVISIONS, RULES, TABLES

Runs = Sequence[Mapping[str, Any]]
Found = Mapping[str, Mapping[int, float]]
"""row -> seed -> per cent."""
WIDTH = 118
DEFAULT = "mean, default bounds"
SUCCESS_ALLOWED, LOSS_ALLOWED = 10.0, 3.0
"""Triggers that may work, per cent, and accuracy that a rule may lose, in points."""


def by_row(runs: Runs, measure: str) -> Found:
    """What a table's runs measured."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        value = run["measures"].get(measure)
        if value is not None and not isnan(value):
            found.setdefault(run["row"], {})[run["seed"]] = 100 * value
    return found


def cell(values: Mapping[int, float] | None) -> str:
    """Mean and half the 95 % t-interval."""
    if not values:
        return "not run"
    spread = f" ± {half_width(list(values.values())):.1f}" if len(values) > 1 else ", one seed"
    return f"{statistics.mean(values.values()):.1f}{spread}"


def lost(accuracy: Found, rule: str, attack: str) -> float | None:
    """Points below the default mean that nobody attacks, paired by seed; None where there is no pair."""
    usual, under = accuracy.get(f"{DEFAULT}: none", {}), accuracy.get(f"{rule}: {attack}", {})
    seeds = usual.keys() & under.keys()
    return statistics.mean(usual[seed] - under[seed] for seed in seeds) if seeds else None


def worst(accuracy: Sequence[Found], success: Sequence[Found], rule: str) -> tuple[float, float] | None:
    """(points lost, per cent of triggers) in a rule's worst case; None where any is missing."""
    points = [lost(found, rule, attack) for found in accuracy for attack in ("loss", "backdoor")]
    works = [found.get(f"{rule}: backdoor") for found in success]
    known = [value for value in points if value is not None]
    shares = [statistics.mean(values.values()) for values in works if values]
    if len(known) < len(points) or len(shares) < len(works):
        return None
    return max(known), max(shares)


def verdict(found: Mapping[str, tuple[float, float]]) -> str:
    """What the page recommends. found: rule -> its worst()."""
    if found.keys() < RULES.keys():
        missing = ", ".join(rule for rule in RULES if rule not in found)
        return f"**Nothing is recommended yet:** not every attack was run on {missing}."
    words = {rule: f"{points:.1f} points and {share:.0f} %" for rule, (points, share) in found.items()}
    held = [
        rule for rule, (points, share) in found.items() if points <= LOSS_ALLOWED and share <= SUCCESS_ALLOWED
    ]
    if held:
        best = min(held, key=lambda rule: found[rule])
        start = f"**Use {best}**: its worst attacks cost {words[best]} of the triggers."
    else:
        least = min(found, key=lambda rule: found[rule][0])
        fewest = min(found, key=lambda rule: found[rule][1])
        start = (
            f"**No rule helps within {LOSS_ALLOWED:g} points and {SUCCESS_ALLOWED:g} % of the triggers.** "
            f"Least accuracy is lost with {least} ({words[least]}), fewest triggers work with {fewest} "
            f"({words[fewest]})."
        )
    return f"{start} The mean with default bounds: {words[DEFAULT]}."


def robust(read: Callable[[str], Runs]) -> str:
    """The block of docs/threat_model.md. read: the runs of a table."""
    accuracy = {name: by_row(read(f"robust_{name}"), "final accuracy") for name in DIVISIONS}
    success = {name: by_row(read(f"robust_{name}"), "attack success") for name in DIVISIONS}
    found = {
        rule: figures
        for rule in RULES
        if (figures := worst(list(accuracy.values()), list(success.values()), rule)) is not None
    }
    lines = [
        fill(verdict(found), WIDTH),
        "",
        "| division: rule | nobody attacks | attack on accuracy | backdoor: accuracy | triggers that work |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in DIVISIONS:
        for rule in RULES:
            cells = [cell(accuracy[name].get(f"{rule}: {attack}")) for attack in ("none", "loss", "backdoor")]
            works = cell(success[name].get(f"{rule}: backdoor"))
            lines.append(f"| {name}: {rule} | {' | '.join((*cells, works))} |")
    return "\n".join(
        [
            *lines,
            "",
            "Per cent; mean of the seeds and half its 95 % t-interval. Points lost are paired by seed with",
            "the mean that nobody attacks, and the worst of both divisions and attacks. From",
            ",\n".join(f"[{name}](../benchmarks/results/{name}.md)" for name in TABLES) + ".",
            "",
        ]
    )
