"""Which rule withstands what, in docs/threat_model.md, from the committed tables of attacks.

`python -m perennial.benchmarks.recommendation` writes it, between the page's marks.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from textwrap import fill
from typing import Any

from perennial.benchmarks.intervals import LEAST_SEEDS, half_width, t_interval
from perennial.benchmarks.tables.robust import (
    BACKDOORS,
    COLLUSIONS,
    FEDERATIONS,
    HAM_ATTACKS,
    HAM_DIVISIONS,
    HAM_RULES,
    RULES,
    WORST,
    colluding_rules,
)

Runs = Sequence[Mapping[str, Any]]
Found = Mapping[str, Mapping[int, float]]
"""row -> seed -> per cent."""
TABLES = (
    "robust_worst_digits",
    "robust_backdoor_rules_digits",
    "robust_colluders_digits",
    "robust_backdoor_digits",
    "robust_ham10000",
)
ACCURACY = {"robust_ham10000": "final balanced accuracy"}
"""Of the tables whose data have mostly one class."""
WIDTH = 118
DEFAULT = "mean, default bounds"
SUCCESS_ALLOWED, ACCURACY_ALLOWED, COLLUDERS_ALLOWED = 5.0, 1.0, 3.0
"""Per cent and points that the page holds the figures against."""


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


def mean(values: Mapping[int, float]) -> float:
    return statistics.mean(values.values())


def difference(first: Mapping[int, float] | None, second: Mapping[int, float] | None) -> str:
    """First minus second, seed by seed, with its interval; '' where there is nothing to compare."""
    seeds = sorted((first or {}).keys() & (second or {}).keys())
    if first is None or second is None or len(seeds) < 2:
        return ""
    return str(t_interval([first[seed] - second[seed] for seed in seeds]))


def rules(worst: Found, success: Found) -> list[str]:
    """Each rule without attack, under its two worst ones, and against a backdoor, at Dirichlet 0.5."""
    lines = [
        "| rule | nobody attacks | its worst attacks | backdoor boosted x5 works |",
        "| --- | --- | --- | --- |",
    ]
    for rule, attacks in WORST.items():
        under = "; ".join(f"{attack} {cell(worst.get(f'{rule}: {attack}'))}" for attack in attacks)
        works = cell(success.get(f"Dirichlet 0.5: {rule}: backdoor x5"))
        lines.append(f"| {rule} | {cell(worst.get(f'{rule}: none'))} | {under} | {works} |")
    return lines


def strongest(worst: Found) -> str | None:
    """The rule that keeps most accuracy under the worse of its attacks; None until all rules were run."""
    kept = {}
    for rule, attacks in WORST.items():
        under = [worst.get(f"{rule}: {attack}", {}) for attack in attacks]
        if any(len(values) < LEAST_SEEDS for values in under):
            return None
        kept[rule] = min(map(mean, under))
    return max(kept, key=lambda rule: kept[rule])


def not_told_apart(worst: Found, best: str) -> list[str]:
    """The rules whose worse accuracy of each seed differs from the best rule's by nothing that shows."""

    def kept(rule: str) -> dict[int, float]:
        under = [worst[f"{rule}: {attack}"] for attack in WORST[rule]]
        return {seed: min(values[seed] for values in under) for seed in set.intersection(*map(set, under))}

    own = kept(best)
    found = []
    for rule in WORST:
        other = kept(rule)
        if (
            rule != best
            and t_interval([own[seed] - other[seed] for seed in own.keys() & other.keys()]).low <= 0
        ):
            found.append(rule)
    return found


def against_accuracy(worst: Found) -> str:
    """What to take against attacks on accuracy where data differ."""
    best = strongest(worst)
    if best is None:
        return "Attacks on accuracy: the tables are not whole yet, so nothing is recommended."
    attack, against = (
        min(WORST[rule], key=lambda attack: mean(worst[f"{rule}: {attack}"])) for rule in (best, DEFAULT)
    )
    cost = difference(worst.get(f"{best}: none"), worst.get(f"{DEFAULT}: none"))
    alike = not_told_apart(worst, best)
    kept, usual = cell(worst[f"{best}: {attack}"]), cell(worst[f"{DEFAULT}: {against}"])
    return fill(
        f"**One site of five that attacks accuracy, data that differ: {best}** (`{RULES[best][0]}`). It "
        f"keeps {kept} under the worse of its attacks ({attack}), the mean with default bounds {usual} "
        f"({against}); when nobody attacks it differs from that mean by {cost} points."
        + (f" These seeds do not tell it from {', '.join(alike)}." if alike else ""),
        WIDTH,
    )


def against_backdoors(worst: Found, success: Found) -> str:
    """What to take against a backdoor where data differ: who keeps it out, and who does so most cheaply."""
    works = {rule: success.get(f"Dirichlet 0.5: {rule}: backdoor x5", {}) for rule in RULES}
    costs = {
        rule: difference(worst.get(f"{DEFAULT}: none"), worst.get(f"{rule}: none"))
        for rule in RULES
        if rule != DEFAULT
    }
    usual = worst.get(f"{DEFAULT}: none")
    if not usual or any(len(values) < LEAST_SEEDS for values in works.values()):
        return "A backdoor where data differ: the tables are not whole yet, so nothing is recommended."
    out = [rule for rule in RULES if mean(works[rule]) <= SUCCESS_ALLOWED]
    cheap = [rule for rule in RULES if mean(usual) - mean(worst[f"{rule}: none"]) <= ACCURACY_ALLOWED]
    best = min(cheap, key=lambda rule: mean(works[rule]))
    kept_out = ", ".join(f"{rule}, at {costs.get(rule) or 'no'} points when nobody attacks" for rule in out)
    return fill(
        "**A backdoor by one site of five, data that differ.** "
        f"At most {SUCCESS_ALLOWED:g} % of the triggers work with: {kept_out or 'none'}. "
        f"Of the rules that cost at most {ACCURACY_ALLOWED:g} point when nobody attacks, "
        f"fewest work with **{best}** (`{RULES[best][0]}`): {cell(works[best])} %.",
        WIDTH,
    )


def verdict(success: Mapping[int, float] | None, attacked: Any, clean: Any) -> str:
    """Whether a backdoor is kept out, and at what accuracy."""
    if not success:
        return "not run"
    held = mean(success) <= SUCCESS_ALLOWED
    words = "kept out" if held else "**not kept out**"
    lost = difference(clean, attacked)
    return f"{words}: works in {cell(success)} %" + (f", accuracy lost {lost} points" if lost else "")


def backdoors(success: Found, accuracy: Found, label: str, attacks: Sequence[str]) -> str:
    """The default bounds against backdoors. label: of the rows, up to the attack."""
    clean = accuracy.get(f"{label}none")
    return "; ".join(
        f"{attack} {verdict(success.get(label + attack), accuracy.get(label + attack), clean)}"
        for attack in attacks
    )


def colluders(accuracy: Found) -> list[str]:
    """What each rule keeps of honest-only training, under the attack on accuracy that costs it most."""
    lines = [
        "| colluding sites | rule | worst attack | accuracy | beside the honest sites alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    advice = []
    for sites, dishonest in FEDERATIONS:
        place = f"{dishonest} of {sites}"
        honest = accuracy.get(f"{place}: the honest sites alone")
        lost: dict[str, float] = {}
        for rule in colluding_rules(sites, dishonest):
            rows = {attack: accuracy.get(f"{place}: {rule}: {attack}") for attack in COLLUSIONS[1:]}
            found = {attack: values for attack, values in rows.items() if values}
            if len(found) < len(rows) or not honest:
                lines.append(f"| {place} | {rule} | - | not run | - |")
                continue
            attack = min(found, key=lambda name: mean(found[name]))
            lost[rule] = mean(honest) - mean(found[attack])
            beside = difference(found[attack], honest)
            lines.append(f"| {place} | {rule} | {attack} | {cell(found[attack])} | {beside} |")
        if lost:
            best = min(lost, key=lambda rule: lost[rule])
            held = "within" if lost[best] <= COLLUDERS_ALLOWED else "**not within**"
            advice.append(f"{place}: {best}, {held} {COLLUDERS_ALLOWED:g} points of the honest sites alone")
    words = "; ".join(advice) or "not run"
    return [fill(f"**Colluding sites, even shares:** {words}.", WIDTH), "", *lines]


def ham(accuracy: Found, success: Found) -> list[str]:
    """The rules at the same attacks on skin lesions: accuracy, and of the backdoor how often it works."""
    lines = [f"| HAM10000 | {' | '.join(HAM_ATTACKS)} |", "| --- " * (1 + len(HAM_ATTACKS)) + "|"]
    for division in HAM_DIVISIONS:
        for rule in HAM_RULES:
            cells = []
            for attack in HAM_ATTACKS:
                row = f"{division}: {rule}: {attack}"
                works = (
                    f"; works in {cell(success[row])} %" if "backdoor" in attack and row in success else ""
                )
                cells.append(cell(accuracy.get(row)) + works)
            lines.append(f"| {division}: {rule} | {' | '.join(cells)} |")
    return lines


def robust(read: Callable[[str], Runs]) -> str:
    """The block of docs/threat_model.md. read: the runs of a table."""
    accuracy = {name: by_row(read(name), ACCURACY.get(name, "final accuracy")) for name in TABLES}
    success = {name: by_row(read(name), "attack success") for name in TABLES}
    digits, skin = "robust_backdoor_digits", "robust_ham10000"
    kept_out = [
        f"- {place}: {backdoors(success[table], accuracy[table], label, attacks)}."
        for place, table, label, attacks in (
            ("digits, even shares", digits, f"even: {DEFAULT}: ", BACKDOORS[1:]),
            ("digits, Dirichlet 0.5", digits, f"Dirichlet 0.5: {DEFAULT}: ", BACKDOORS[1:]),
            ("HAM10000, even shares", skin, f"even: {DEFAULT}: ", ("backdoor x5",)),
            ("HAM10000, Dirichlet 0.5", skin, f"Dirichlet 0.5: {DEFAULT}: ", ("backdoor x5",)),
        )
    ]
    worst = accuracy["robust_worst_digits"]
    works = {**success["robust_backdoor_rules_digits"], **success[digits]}
    return "\n".join(
        [
            against_accuracy(worst),
            "",
            against_backdoors(worst, works),
            "",
            *rules(worst, works),
            "",
            *colluders(accuracy["robust_colluders_digits"]),
            "",
            "**Backdoors by one site of five, default bounds:**",
            "",
            *kept_out,
            "",
            *ham(accuracy[skin], success[skin]),
            "",
            "Per cent, of HAM10000 balanced; mean of the seeds and half its 95 % t-interval; differences are "
            "paired by seed. From",
            ",\n".join(f"[{name}](../benchmarks/results/{name}.md)" for name in TABLES) + ".",
            "",
        ]
    )
