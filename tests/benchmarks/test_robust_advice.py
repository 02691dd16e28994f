"""The recommendation of docs/threat_model.md follows from the tables of attacks."""

from typing import Any

from perennial.benchmarks.robust_advice import (
    against_accuracy,
    against_backdoors,
    by_row,
    colluders,
    not_told_apart,
    robust,
    strongest,
    verdict,
)
from perennial.benchmarks.tables.robust import COLLUSIONS, FEDERATIONS, RULES, WORST, colluding_rules

SEEDS = (1, 2, 3, 4, 5)


def seeds(value: float, step: float = 0.1) -> dict[int, float]:
    return {seed: value + step * seed for seed in SEEDS}


def attacked(**kept: float) -> dict[str, dict[int, float]]:
    """Each rule keeps 90 without attack and 50 under any, but for those named."""
    found = {}
    for rule, attacks in WORST.items():
        found[f"{rule}: none"] = seeds(90)
        for attack in attacks:
            found[f"{rule}: {attack}"] = seeds(kept.get(rule.replace(" ", "_"), 50))
    return found


def test_the_rule_that_keeps_most_under_the_worse_of_its_attacks_is_recommended() -> None:
    worst = attacked(geometric_median=80, trimmed_mean=95)
    # good against one attack and bad against the other
    worst[f"trimmed mean: {WORST['trimmed mean'][1]}"] = seeds(40)
    assert strongest(worst) == "geometric median"
    text = " ".join(against_accuracy(worst).split())
    assert f"(`{RULES['geometric median'][0]}`)" in text and "keeps 80.3" in text
    assert "differs from that mean by +0.0 (+0.0 to +0.0) points" in text
    assert "do not tell it from" not in text


def test_rules_that_the_seeds_do_not_tell_apart_are_named() -> None:
    worst = attacked(geometric_median=80, median=79.9)
    for attack in WORST["median"]:
        worst[f"median: {attack}"] = dict(zip(SEEDS, (70, 90, 75, 88, 77), strict=True))
    assert not_told_apart(worst, "geometric median") == ["median"]
    assert "do not tell it from median." in " ".join(against_accuracy(worst).split())


def test_nothing_is_recommended_from_a_table_with_gaps() -> None:
    worst = attacked(median=80)
    del worst["median: none"], worst["geometric median: sign flip"][5]
    assert strongest(worst) is None
    assert "nothing is recommended" in against_accuracy(worst)


def test_who_keeps_a_backdoor_out_and_at_which_cost() -> None:
    worst = attacked()
    worst["multi-Krum of 2: none"], worst["median: none"] = seeds(80), seeds(88)
    success = {f"Dirichlet 0.5: {rule}: backdoor x5": seeds(60) for rule in RULES}
    success["Dirichlet 0.5: multi-Krum of 2: backdoor x5"] = seeds(1)
    success["Dirichlet 0.5: median: backdoor x5"] = seeds(7)
    success["Dirichlet 0.5: trimmed mean: backdoor x5"] = seeds(20)
    text = " ".join(against_backdoors(worst, success).split())
    # the median would let fewer through than the trimmed mean, and costs two points
    assert "work with: multi-Krum of 2, at +10.0 (+10.0 to +10.0) points when nobody attacks." in text
    assert "fewest work with **trimmed mean** (`strategy=trimmed_mean`): 20.3 ± 0.2 %" in text
    del success["Dirichlet 0.5: median: backdoor x5"]
    assert "nothing is recommended" in against_backdoors(worst, success)


def test_a_backdoor_is_kept_out_up_to_five_per_cent() -> None:
    assert verdict(seeds(4.0), seeds(97.0), seeds(98.0)) == (
        "kept out: works in 4.3 ± 0.2 %, accuracy lost +1.0 (+1.0 to +1.0) points"
    )
    assert verdict(seeds(5.0), None, None).startswith("**not kept out**: works in 5.3")
    assert verdict(None, None, None) == "not run"


def test_colluders_are_held_against_the_honest_sites_alone() -> None:
    accuracy = {}
    for sites, dishonest in FEDERATIONS:
        place = f"{dishonest} of {sites}"
        accuracy[f"{place}: the honest sites alone"] = seeds(95)
        for rule in colluding_rules(sites, dishonest):
            for attack in COLLUSIONS[1:]:
                kept = {"median": 93, "geometric median": 94 if sites == 8 else 80}.get(rule, 60)
                accuracy[f"{place}: {rule}: {attack}"] = seeds(kept if attack == "a_little" else 95)
    lines = colluders(accuracy)
    assert " ".join(lines[0].split()) == (
        "**Colluding sites, even shares:** 2 of 8: geometric median, within 3 points of the honest sites "
        "alone; 4 of 10: median, within 3 points of the honest sites alone."
    )
    assert "| 4 of 10 | geometric median | a_little | 80.3 ± 0.2 | -15.0 (-15.0 to -15.0) |" in lines
    assert "not run" in colluders({})[0]


def test_what_a_run_did_not_measure_is_left_out() -> None:
    runs = [
        {"row": "a", "seed": 1, "measures": {"x": 0.5}},
        {"row": "a", "seed": 2, "measures": {"x": float("nan")}},
        {"row": "b", "seed": 1, "measures": {}},
    ]
    assert by_row(runs, "x") == {"a": {1: 50.0}}


def test_without_any_result_the_block_says_so() -> None:
    def nothing(table: str) -> list[dict[str, Any]]:
        return []

    text = robust(nothing)
    assert "nothing is recommended" in text and "backdoor x5 not run" in text
