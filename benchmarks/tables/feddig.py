"""FedDig: what stays of absent sites, in the scenarios of its paper and in one that no paper has."""

import json
from typing import Any

from benchmarks.table import ROOT, Measure, Row, Table
from config.experiment import load_experiment
from config.simulation import simulated_federation

SEQUENTIAL, AVERAGED = "mean of the last 9 rounds", 9
IMAGE_BRANCH_ONLY = ("model.name=small_cnn", "model.backbone=null")
"""FedAvg as the paper has it: without the branch that reads digests."""
BASE = ("strategy=fedavg",)
RANDOM = ("digests.mix=random",)
SEEDED = "digests.noise_source=seeded"


def rounds_mean(first: int | None = None, last: int | None = None) -> Measure:
    """Mean accuracy over rounds first .. last of the run; by default its last 9."""

    def measure(summary: dict[str, Any]) -> float:
        accuracy = summary["accuracy_by_round"]
        part = accuracy[-AVERAGED:] if first is None else accuracy[first - 1 : last]
        return sum(part) / len(part)

    return measure


def lost_classes(site: str) -> Measure:
    """Share of right answers on a site's classes of task 1 that is left at the end, over that at its end."""

    def measure(summary: dict[str, Any]) -> float:
        file = ROOT / "experiments" / "feddig_classes_digits.yaml"
        held = simulated_federation(load_experiment(file, seed=summary["seed"])).sites[site]
        after_task = summary["class_accuracy"][0]
        labels = held.counts("train", len(after_task)).nonzero().flatten().tolist()
        before = sum(after_task[label] for label in labels)
        return sum(summary["class_accuracy"][-1][label] for label in labels) / before if before else 0.0

    return measure


def away(*absences: tuple[int, int, int | None]) -> str:
    """A change of the experiment's absence: (site, first round, last round) each."""
    entries = [
        {"site": f"site-{site}", "first_round": first} | ({} if last is None else {"last_round": last})
        for site, first, last in absences
    ]
    return f"absence={json.dumps(entries)}"


SCENARIOS = {
    "nobody": away(),
    "one away, rounds 11 to 20": away((0, 11, 20)),
    "one away for good": away((0, 11, None)),
    "two groups, one after the other": away((0, 16, None), (1, 16, None), (2, 1, 15), (3, 1, 15)),
}
PAPER = {
    "nobody": (84.6, 83.5),
    "one away, rounds 11 to 20": (83.0, 83.2),
    "one away for good": (77.5, 81.0),
    "two groups, one after the other": (68.3, 75.3),
}
LAST = {SEQUENTIAL: rounds_mean()}
PROXIMAL = "learner.correction={name: fedprox, mu: 0.01}"

TABLES = {
    "feddig_digits": Table(
        "FedDig, digits: four sites with disjoint classes leave one after the other",
        [
            Row("FedAvg", "fedavg_absence_digits", IMAGE_BRANCH_ONLY, {SEQUENTIAL: 51.6}),
            Row("FedAvg, with FedDig's network", "fedavg_absence_digits"),
            Row("FedDig, mixing within classes", "feddig_digits"),
            Row("FedDig, mixing at random", "feddig_digits", RANDOM, {SEQUENTIAL: 77.6}),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=LAST,
        note="The paper's figures are for 62 classes of EMNIST and 260 rounds. Nobody is left in the rounds "
        "that are measured.",
    ),
    "feddig_classes_digits": Table(
        "FedDig, digits in two tasks: the only site with some classes leaves after their task",
        [
            Row("FedAvg with exemplars", "feddig_classes_digits", BASE),
            Row("FedDig with exemplars", "feddig_classes_digits"),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures={
            "kept of the lost classes": lost_classes("site-0"),
            "final accuracy": lambda summary: summary["final_accuracy"],
        },
    ),
    "feddig_fashion_mnist": Table(
        "FedDig, 1200 images of Fashion-MNIST: four sites with disjoint classes leave one after the other",
        [
            Row("FedAvg", "feddig_fashion_mnist", (*BASE, *IMAGE_BRANCH_ONLY)),
            Row("FedDig, mixing within classes", "feddig_fashion_mnist"),
        ],
        measures=LAST,
    ),
    "feddig_protection_digits": Table(
        "FedDig, digits, everybody leaves: samples in a digest, and the published noise",
        [
            Row("1 sample", "feddig_digits", ("digests.per_digest=1",)),
            Row("16 samples", "feddig_digits", ("digests.per_digest=16",)),
            Row(
                "published noise, nominal epsilon 0.005 (1600 for a sample, were its scale public)",
                "feddig_digits",
                (SEEDED, "digests.protection=paper", "digests.epsilon=0.005"),
            ),
        ],
        measures=LAST,
        note="4 samples without noise: feddig_digits.md. Labels leave in the clear in every row.",
    ),
    "feddig_noise_digits": Table(
        "FedDig, digits, everybody leaves: noise that is worth its epsilon",
        [
            Row(
                "honest Laplace noise, epsilon 8",
                "feddig_digits",
                (SEEDED, "digests.protection=laplace", "digests.epsilon=8", "digests.largest=1"),
            ),
            Row(
                "honest Gaussian noise, epsilon 8, delta 1e-5",
                "feddig_digits",
                (SEEDED, "digests.protection=gauss", "digests.epsilon=8", "digests.norm=4"),
            ),
        ],
        measures=LAST,
        note="4 samples in a digest; without noise: feddig_digits.md. Labels leave in the clear.",
    ),
    "feddig_scenarios_digits": Table(
        "FedDig, digits: the other scenarios of table I, 30 rounds",
        [
            Row(
                f"{scenario}: {name}",
                "feddig_digits",
                ("tasks.rounds=30", change, *extra),
                {SEQUENTIAL: PAPER[scenario][index]},
            )
            for scenario, change in SCENARIOS.items()
            for index, (name, extra) in enumerate((("FedAvg", (*BASE, *IMAGE_BRANCH_ONLY)), ("FedDig", ())))
        ],
        measures={**LAST, "mean of rounds 11 to 20": rounds_mean(11, 20)},
    ),
    "feddig_bases_digits": Table(
        "FedDig, digits, everybody leaves: FedProx alone and under FedDig",
        [
            Row(
                "FedProx",
                "fedavg_absence_digits",
                (*IMAGE_BRANCH_ONLY, PROXIMAL),
                {SEQUENTIAL: 51.8},
            ),
            Row("FedDig on FedProx", "feddig_digits", (PROXIMAL,), {SEQUENTIAL: 77.2}),
        ],
        measures=LAST,
    ),
}
