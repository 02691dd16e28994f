"""Attacks against rules: one dishonest site of five, and colluders."""

from collections.abc import Iterable, Mapping, Sequence

from perennial.benchmarks.table import Measure, Row, Table, of
from perennial.benchmarks.tables.own_data import final_balanced

RULES: Mapping[str, Sequence[str]] = {
    "mean, no bounds": ("bounds={norm_multiple: null, samples_multiple: null}",),
    "mean, default bounds": (),
    "median": ("strategy=median",),
    "trimmed mean": ("strategy=trimmed_mean",),
    "multi-Krum of 2": ("strategy={name: krum, dishonest: 1, chosen: 2}",),
    "geometric median": ("strategy=geometric_median",),
    "centred clipping": ("strategy=centred_clipping",),
    "attention, sign -1, scale mean": ("strategy={name: layer_attention, sign: -1, scale: mean}",),
}
ATTACKS: Mapping[str, str] = {
    "none": "",
    "label flip": "label_flip",
    "one-class flip": "one_class_flip",
    "sign flip": "sign_flip",
    "scaling x10": "scaling:boost=10",
    "scaling x100": "scaling:boost=100",
    "random": "random",
    "random x10": "random:boost=10",
    "a little is enough": "a_little",
    "a little is enough, z 1.5": "a_little:z=1.5",
    "inner product": "inner_product",
    "inner product x2.5": "inner_product:boost=2.5",
    "backdoor": "backdoor",
    "backdoor x5": "backdoor:boost=5",
    "backdoor x100": "backdoor:boost=100",
    "backdoor, claims 1e8": "backdoor:samples=1e8",
    "free rider": "free_rider",
}
"""benchmarks/dishonest.py says what each does.

Noise of an honest length, an inner product of 2 and a little (z 0.3) do no more to an even mean of five than
the site's absence. Each stands here in a stronger form as well: an inner product of 5 turns the mean round.
"""
AGAIN = (
    "Runs of the mean with bounds and of layer attention were made while a bound compared sites, and are to "
    "be made again."
)
SURVEY = "One seed: a survey, whose differences of a few points mean nothing."
DIVISIONS: Mapping[str, str] = {"even": "100", "Dirichlet 0.5": "0.5", "Dirichlet 0.1": "0.1"}
MEASURES: Mapping[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "attack success": of("attack_success"),
}
MOVED: Mapping[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "attack success": of("moved_to_target"),
}
NOTE = (
    "Five sites, the last of which attacks in every round, knowing the others' updates. Attack success: of "
    "backdoor and one-class flip, and without attack of a trigger that nobody planted. A run that lost its "
    "quorum is at chance."
)


def crossed(
    experiment: str,
    divisions: Sequence[str],
    rules: Mapping[str, Sequence[str]] = RULES,
    attacks: Iterable[str] = ATTACKS,
) -> list[Row]:
    """Each rule under each attack in each division, one division after the other."""
    return [
        Row(
            f"{division}: {rule}: {attack}",
            experiment,
            (*changes, f"data.partition.alpha={DIVISIONS[division]}"),
            attack=ATTACKS[attack],
        )
        for division in divisions
        for attack in attacks
        for rule, changes in rules.items()
    ]


WORST: Mapping[str, tuple[str, str]] = {
    "mean, no bounds": ("inner product", "scaling x10"),
    "mean, default bounds": ("inner product", "sign flip"),
    "median": ("inner product", "sign flip"),
    "trimmed mean": ("inner product", "sign flip"),
    "multi-Krum of 2": ("free rider", "sign flip"),
    "geometric median": ("inner product", "sign flip"),
    "centred clipping": ("inner product", "sign flip"),
    "attention, sign -1, scale mean": ("inner product", "sign flip"),
}
"""By accuracy, in the survey of robust_digits at Dirichlet 0.5; backdoors have a table of their own."""


def worst() -> list[Row]:
    """Each rule without attack and under its two worst ones, at Dirichlet 0.5."""
    return [
        Row(
            f"{rule}: {attack}",
            "robust_digits",
            (*RULES[rule], "data.partition.alpha=0.5"),
            attack=ATTACKS[attack],
        )
        for rule, attacks in WORST.items()
        for attack in ("none", *attacks)
    ]


BACKDOORS = ("none", "backdoor", "backdoor x5", "backdoor x100", "backdoor, claims 1e8")
OTHERS = {rule: changes for rule, changes in RULES.items() if not rule.startswith("mean")}
MEANS = {rule: changes for rule, changes in RULES.items() if rule.startswith("mean")}


def honest() -> list[Row]:
    """What a rule costs when nobody attacks, by heterogeneity."""
    return [
        Row(
            f"Dirichlet {alpha}: {rule}",
            "robust_digits",
            (*changes, f"data.partition.alpha={alpha}"),
            attack="",
        )
        for alpha in ("1.0", "0.5", "0.3", "0.1")
        for rule, changes in RULES.items()
    ]


FEDERATIONS = ((8, 2), (10, 4))
"""(sites, colluders)."""
COLLUSIONS = ("none", "label_flip", "a_little", "inner_product", "backdoor")


def colluding_rules(sites: int, dishonest: int) -> dict[str, str]:
    """What is in its range there."""
    rules = {
        "mean, default bounds": "strategy=fedavg",
        "median": "strategy=median",
        "trimmed mean": f"strategy={{name: trimmed_mean, dishonest: {dishonest}}}",
        "geometric median": "strategy=geometric_median",
    }
    if sites >= 2 * dishonest + 3:
        rules["multi-Krum of 4"] = f"strategy={{name: krum, dishonest: {dishonest}, chosen: 4}}"
    return rules


def colluders() -> list[Row]:
    """Two of eight and four of ten."""
    found = []
    for sites, dishonest in FEDERATIONS:
        for rule, change in colluding_rules(sites, dishonest).items():
            for name in COLLUSIONS:
                # the least boost that turns the mean of all round
                boost = f",boost={sites / dishonest / 2:g}" if name == "inner_product" else ""
                attack = "" if name == "none" else f"{name}:sites={dishonest}{boost}"
                changes = (change, f"data.sites={sites}", "data.partition.alpha=100")
                label = f"{dishonest} of {sites}: {rule}: {name}"
                found.append(Row(label, "robust_digits", changes, attack=attack))
        # what colluders are compared with: the honest sites alone, each with the data that it has there
        changes = (f"data.sites={sites}", "data.partition.alpha=100")
        label = f"{dishonest} of {sites}: the honest sites alone"
        found.append(Row(label, "robust_digits", changes, attack=f"absent:sites={dishonest}"))
    return found


HAM_RULES = ("mean, no bounds", "mean, default bounds", "multi-Krum of 2", "attention, sign -1, scale mean")
HAM_MEASURES: Mapping[str, Measure] = {"final balanced accuracy": final_balanced}
HAM_DIVISIONS = ("even", "Dirichlet 0.5")
HAM_ATTACKS = ("none", "backdoor x5", "inner product", "label flip")

TABLES = {
    "robust_digits": Table(
        "Attacks against rules, digits, one dishonest site of five",
        crossed("robust_digits", tuple(DIVISIONS)),
        (1,),
        MEASURES,
        f"{NOTE} {SURVEY}",
        pending=AGAIN,
    ),
    "robust_worst_digits": Table(
        "Each rule under its two worst attacks, digits at Dirichlet 0.5, one dishonest site of five",
        worst(),
        (1, 2, 3, 4, 5),
        MEASURES,
        f"{NOTE} The worst two by final accuracy in the survey, `robust_digits`.",
    ),
    "robust_backdoor_digits": Table(
        "Backdoors against the default bounds, digits, one dishonest site of five",
        crossed("robust_digits", ("even", "Dirichlet 0.5"), MEANS, BACKDOORS),
        (1, 2, 3, 4, 5),
        MOVED,
        f"{NOTE} Half of the dishonest site's samples carry the trigger. Success counts samples that the "
        "model does not call the attacker's class without the trigger.",
        pending=AGAIN,
    ),
    "robust_backdoor_rules_digits": Table(
        "A backdoor against each rule, digits at Dirichlet 0.5, one dishonest site of five",
        crossed("robust_digits", ("Dirichlet 0.5",), OTHERS, ("none", "backdoor x5")),
        (1, 2, 3, 4, 5),
        MOVED,
        f"{NOTE} Success counts samples that the model does not call the attacker's class without the "
        "trigger. The means stand in `robust_backdoor_digits`.",
    ),
    "robust_honest_digits": Table(
        "What a rule costs when nobody attacks, digits, five sites",
        honest(),
        (1, 2, 3, 4, 5),
        {"final accuracy": of("final_accuracy")},
        pending=AGAIN,
    ),
    "robust_colluders_digits": Table(
        "Colluding sites, digits",
        colluders(),
        (1, 2, 3, 4, 5),
        MEASURES,
        NOTE.replace("Five sites, the last", "The last"),
        pending=AGAIN,
    ),
    "robust_ham10000": Table(
        "Attacks against rules, HAM10000, one dishonest site of five",
        crossed("robust_ham10000", HAM_DIVISIONS, {rule: RULES[rule] for rule in HAM_RULES}, HAM_ATTACKS),
        (1, 2, 3, 4, 5),
        {**HAM_MEASURES, "attack success": of("moved_to_target")},
        f"{NOTE} Half of the dishonest site's samples carry the trigger. Success counts samples that the "
        "model does not call the attacker's class without the trigger. Rounds and learning rate were chosen "
        "on seeds 11 to 13 without an attack.",
        pending=AGAIN,
    ),
}
