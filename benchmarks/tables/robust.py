"""Attacks against rules: one dishonest site of five, and colluders."""

from collections.abc import Mapping, Sequence

from perennial.benchmarks.table import Measure, Row, Table, of

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
    "a little is enough": "a_little",
    "inner product": "inner_product",
    "backdoor x5": "backdoor:boost=5",
    "backdoor, claims 1e8": "backdoor:samples=1e8",
    "free rider": "free_rider",
}
"""benchmarks/dishonest.py says what each does."""
SURVEY = "One seed: a survey, whose differences of a few points mean nothing."
DIVISIONS: Mapping[str, str] = {"even": "100", "Dirichlet 0.5": "0.5", "Dirichlet 0.1": "0.1"}
MEASURES: Mapping[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "attack success": of("attack_success"),
}
NOTE = (
    "Five sites, the last of which attacks in every round, knowing the others' updates. Attack success: of "
    "backdoor and one-class flip, and without attack of a trigger that nobody planted. A run that lost its "
    "quorum is at chance."
)


def rows() -> list[Row]:
    """Every attack, rule and division, the even one first."""
    return [
        Row(
            f"{division}: {rule}: {attack}",
            "robust_digits",
            (*changes, f"data.partition.alpha={alpha}"),
            attack=code,
        )
        for division, alpha in DIVISIONS.items()
        for attack, code in ATTACKS.items()
        for rule, changes in RULES.items()
    ]


def colluders() -> list[Row]:
    """Two of eight and four of ten, with what is in its range there."""
    found = []
    for sites, dishonest in ((8, 2), (10, 4)):
        rules = {
            "mean, default bounds": "strategy=fedavg",
            "median": "strategy=median",
            "trimmed mean": f"strategy={{name: trimmed_mean, dishonest: {dishonest}}}",
            "geometric median": "strategy=geometric_median",
        }
        if sites >= 2 * dishonest + 3:
            rules["multi-Krum of 4"] = f"strategy={{name: krum, dishonest: {dishonest}, chosen: 4}}"
        for rule, change in rules.items():
            for name in ("", "label_flip", "a_little", "inner_product", "backdoor"):
                attack = f"{name}:sites={dishonest}" if name else ""
                label = f"{dishonest} of {sites}: {rule}: {name or 'none'}"
                changes = (change, f"data.sites={sites}", "data.partition.alpha=100")
                found.append(Row(label, "robust_digits", changes, attack=attack))
    return found


HAM_RULES = ("mean, no bounds", "mean, default bounds", "multi-Krum of 2")
HAM_ATTACKS = ("none", "backdoor x5", "inner product", "label flip")

TABLES = {
    "robust_digits": Table(
        "Attacks against rules, digits, one dishonest site of five",
        rows(),
        (1,),
        MEASURES,
        f"{NOTE} {SURVEY}",
        pending="The runs so far are of the even division; five seeds of the worst attacks are to follow.",
    ),
    "robust_colluders_digits": Table(
        "Colluding sites, digits",
        colluders(),
        (1, 2, 3),
        MEASURES,
        NOTE.replace("Five sites, the last", "The last"),
        pending="Defined with the rules; its runs are still to be made.",
    ),
    "robust_ham10000": Table(
        "Attacks against rules, HAM10000, one dishonest site of five",
        [
            Row(f"{rule}: {attack}", "robust_ham10000", tuple(RULES[rule]), attack=ATTACKS[attack])
            for attack in HAM_ATTACKS
            for rule in HAM_RULES
        ],
        (1, 2, 3, 4, 5),
        MEASURES,
        NOTE,
        pending="Defined with the rules; its runs are still to be made.",
    ),
}
