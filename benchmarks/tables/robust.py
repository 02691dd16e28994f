"""Rules against one dishonest site of five that knows them, five tasks of digits."""

from collections.abc import Mapping, Sequence

from benchmarks.table import Measure, Row, Table, of

OTHERS = {
    "trimmed mean": "TrimmedMean",
    "multi-Krum of 2": "Krum",
    "geometric median": "GeometricMedian",
    "centred clipping": "CentredClipping",
    "median of pairs": "Bucketing",
}
"""Rules of benchmarks/compared_rules.py."""
RULES: Mapping[str, Sequence[str]] = {
    "mean, bounds": (),
    "median": ("strategy=median",),
    **{rule: (f"strategy.name=benchmarks.compared_rules:{name}",) for rule, name in OTHERS.items()},
}
ATTACKS: Mapping[str, str] = {
    "none": "",
    "loss": "adaptive",
    "backdoor": "adaptive_backdoor",
}
"""benchmarks/adaptive.py says what each does."""
DIVISIONS: Mapping[str, str] = {"even": "100", "uneven": "0.5"}
"""Name of a table -> Dirichlet parameter of its division."""
SEEDS = (101, 102, 103, 104, 105)
MEASURES: Mapping[str, Measure] = {
    "final accuracy": of("final_accuracy"),
    "attack success": of("moved_to_target"),
}
NOTE = (
    "Five tasks of two classes, four rounds each. The last of five sites attacks in every round: it "
    "knows the rule, the bounds and the honest updates, tries steps from their mean in several "
    "directions and lengths on the server's own rule, and sends the one after which its wish is best "
    "fulfilled. *Loss*: the model's loss on its samples is largest. *Backdoor*: a trigger works best, "
    "and samples without it too. It claims as many samples as a message may hold. Attack success counts "
    "samples that the model does not call the attacker's class without the trigger. Learner, rounds and "
    "exemplars were chosen on seeds 70 to 72 without an attack."
)


def rows(alpha: str) -> list[Row]:
    """Each rule without an attack and under each."""
    return [
        Row(
            f"{rule}: {attack}",
            "robust_digits",
            (*changes, f"data.partition.alpha={alpha}"),
            attack=spoken,
        )
        for attack, spoken in ATTACKS.items()
        for rule, changes in RULES.items()
    ]


TABLES = {
    f"robust_{name}": Table(
        f"Rules against one adaptive attacker of five, digits in five tasks, "
        f"{'even shares' if name == 'even' else f'Dirichlet {alpha}'}",
        rows(alpha),
        SEEDS,
        MEASURES,
        NOTE,
        pending="Most runs are still to be made; the program goes on where it stopped.",
    )
    for name, alpha in DIVISIONS.items()
}
