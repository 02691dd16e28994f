"""FedDig: how much the model keeps of absent sites, in the paper's scenarios and in one more."""

import json
from typing import Any

from benchmarks.paper_claims import Claim
from benchmarks.paper_sheets import tables_of_paper
from benchmarks.table import ROOT, TEN_SEEDS, Measure, Row, Table
from perennial.config.experiment import load_experiment
from perennial.config.simulation import load_simulated_federation

SEQUENTIAL, AVERAGED = "mean of the last 9 rounds", 9
IMAGE_BRANCH_ONLY = ("model.name=small_cnn", "model.backbone=null")
"""FedAvg as the paper has it: without the branch that reads digests."""
BASE = ("strategy=fedavg",)
TOGETHER = "strategy.spread=false"
"""Digests as the sites lent them, as in the paper."""
ONE_EPOCH = "strategy={name: digest_synthesis, base: fedavg, server_lr: 0.01, guidance_lr: 1.0}"
"""The server trains once over the digests in a round, as they came."""
RANDOM = "digests.mix=random"


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
        held = load_simulated_federation(load_experiment(file, seed=summary["seed"])).sites[site]
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


NEVER_STOP = "rounds={max_skipped: 60}"
"""FedAvg's rounds are skipped once nobody is there."""


def half_leave(sites: int, least: int | None = None) -> tuple[str, ...]:
    """Settings in which half of the sites, whose data are unequal, leave for good after round 8 of 20.

    least: samples of a site, if there are too few for the usual number at each.
    """
    absences = away(*((number, 9, None) for number in range(sites // 2)))
    return (
        "tasks.rounds=20",
        f"data.sites={sites}",
        f"data.partition={{kind: dirichlet, alpha: 0.1{'' if least is None else f', min_samples: {least}'}}}",
        absences,
    )


SCENARIOS = {
    "nobody": away(),
    "one away, rounds 7 to 13": away((0, 7, 13)),
    "one away for good": away((0, 7, None)),
    "two groups, one after the other": away((0, 11, None), (1, 11, None), (2, 1, 10), (3, 1, 10)),
}
PAPER = {
    "nobody": (84.6, 83.5),
    "one away, rounds 7 to 13": (83.0, 83.2),
    "one away for good": (77.5, 81.0),
    "two groups, one after the other": (68.3, 75.3),
}
LAST = {SEQUENTIAL: rounds_mean()}
LATEST = "mean of the last 3 rounds"
KEPT = "kept of the lost classes"
BY_SCENARIO = [
    Claim(f"{scenario}: FedDig over FedAvg (table I)", f"{scenario}: FedDig", f"{scenario}: FedAvg", LATEST)
    for scenario in SCENARIOS
]
FINAL = {LATEST: rounds_mean(18, 20)}
"""Of SHORT, in which nobody is left then."""
SHORT = ("tasks.rounds=20", away((0, 9, None), (1, 12, None), (2, 15, None), (3, 18, None)), NEVER_STOP)
SIZES = (1, 2, 4, 8, 16)
METHODS = (("FedAvg", (*BASE, *IMAGE_BRANCH_ONLY)), ("FedDig", ()))
LESS_WORK = ("strategy.server_epochs=2",)
"""Half of the server's training, for tables of many rows."""
CHEAP = (METHODS[0], ("FedDig", LESS_WORK))
SHORT_DIGESTS = (*SHORT, *LESS_WORK)
ALONE = ("fedavg_absence_digits", (*SHORT, *IMAGE_BRANCH_ONLY))
LAPLACE = ("digests.protection=laplace", "digests.epsilon=8", "digests.largest=1")
GAUSS = ("digests.protection=gauss", "digests.epsilon=8", "digests.norm=4")
HONEST = {"honest Laplace noise, epsilon 8": LAPLACE, "honest Gaussian noise, epsilon 8, delta 1e-5": GAUSS}
PROXIMAL = "learner.correction={name: fedprox, mu: 0.01}"

TABLES = {
    "feddig_digits": Table(
        "FedDig, digits: four sites with disjoint classes leave one after the other",
        [
            Row("FedAvg", "fedavg_absence_digits", IMAGE_BRANCH_ONLY, {SEQUENTIAL: 51.6}),
            Row("FedAvg, with FedDig's network", "fedavg_absence_digits"),
            Row("FedDig, mixing at random", "feddig_digits", (ONE_EPOCH, RANDOM), {SEQUENTIAL: 77.6}),
            Row("FedDig, mixing within classes", "feddig_digits", (ONE_EPOCH,)),
            Row("FedDig, mixing within classes, spread, 4 server epochs", "feddig_digits"),
        ],
        measures=LAST,
        note="The paper's figures are for 62 classes of EMNIST and 260 rounds. Nobody is left in the rounds "
        "that are measured.",
        claims=[
            Claim(f"{words} over FedAvg when everybody leaves", row, "FedAvg", SEQUENTIAL)
            for words, row in (
                ("FedDig as published (table I)", "FedDig, mixing at random"),
                ("FedDig as recommended here", "FedDig, mixing within classes, spread, 4 server epochs"),
            )
        ],
        seeds=TEN_SEEDS,
    ),
    "feddig_stopping_digits": Table(
        "FedDig, digits, everybody leaves: when to stop, how many steps, and noise without mixing",
        [
            Row("FedDig", "feddig_digits"),
            *[
                Row(
                    f"1 sample in a digest, {name}",
                    "feddig_digits",
                    (ONE_EPOCH, "digests.per_digest=1", *noise),
                )
                for name, noise in HONEST.items()
            ],
        ],
        measures=LAST,
        note="FedDig has 4 samples in a digest, which the server spreads and trains on for 4 epochs a round; "
        "with noise nothing is spread, and it is one epoch.",
        seeds=TEN_SEEDS,
    ),
    "feddig_classes_digits": Table(
        "FedDig, digits in two tasks: the only site with some classes leaves after their task",
        [
            Row("FedAvg with exemplars", "feddig_classes_digits", BASE),
            Row("FedDig with exemplars", "feddig_classes_digits"),
        ],
        measures={
            KEPT: lost_classes("site-0"),
            "final accuracy": lambda summary: summary["final_accuracy"],
        },
        claims=[
            Claim(
                "classes that left with their only site are kept better (ours)",
                "FedDig with exemplars",
                "FedAvg with exemplars",
                KEPT,
            )
        ],
        seeds=TEN_SEEDS,
    ),
    "feddig_fashion_mnist": Table(
        "FedDig, 1000 images of Fashion-MNIST: four sites with disjoint classes leave one after the other",
        [
            Row("FedAvg", "feddig_fashion_mnist", (*BASE, *IMAGE_BRANCH_ONLY)),
            Row("FedDig, mixing within classes, spread", "feddig_fashion_mnist"),
        ],
        measures=LAST,
        claims=[
            Claim(
                "FedDig as recommended here over FedAvg when everybody leaves",
                "FedDig, mixing within classes, spread",
                "FedAvg",
                SEQUENTIAL,
            )
        ],
        seeds=TEN_SEEDS,
    ),
    "feddig_noise_digits": Table(
        "FedDig, digits, everybody leaves: noise that is worth its epsilon",
        [Row(name, "feddig_digits", (ONE_EPOCH, *noise)) for name, noise in HONEST.items()],
        measures=LAST,
        note="4 samples in a digest; without noise: feddig_digits.md. Labels leave in the clear.",
    ),
    "feddig_scenarios_digits": Table(
        "FedDig, digits: the other scenarios of table I, 20 rounds",
        [
            Row(
                f"{scenario}: {name}",
                "feddig_digits",
                ("tasks.rounds=20", change, *extra),
                {LATEST: PAPER[scenario][index]},
            )
            for scenario, change in SCENARIOS.items()
            for index, (name, extra) in enumerate(CHEAP)
        ],
        measures={**FINAL, "mean of rounds 7 to 13": rounds_mean(7, 13)},
        note="The paper's figures are of 300 rounds of EMNIST.",
        claims=BY_SCENARIO,
        seeds=TEN_SEEDS,
    ),
    "feddig_bases_digits": Table(
        "FedDig, digits, everybody leaves within 20 rounds: other methods alone, and FedDig on them",
        [
            Row("FedAvg", *ALONE, {LATEST: 51.6}),
            Row("FedProx (mu 0.01)", ALONE[0], (*ALONE[1], PROXIMAL), {LATEST: 51.8}),
            Row("FedNova", ALONE[0], (*ALONE[1], "strategy=fednova"), {LATEST: 53.0}),
            Row("FedDyn (alpha 0.1)", ALONE[0], (*ALONE[1], "strategy={name: feddyn, alpha: 0.1}")),
            Row(
                "AdaBest (mu 0.02, beta 0.3)",
                ALONE[0],
                (*ALONE[1], "strategy={name: adabest, mu: 0.02, beta: 0.3}"),
                {LATEST: 47.0},
            ),
            Row("FedDig on FedAvg", "feddig_digits", SHORT_DIGESTS, {LATEST: 77.6}),
            Row("FedDig on FedProx (mu 0.01)", "feddig_digits", (*SHORT_DIGESTS, PROXIMAL), {LATEST: 77.2}),
            Row(
                "FedDig on FedNova",
                "feddig_digits",
                (*SHORT_DIGESTS, "strategy.base=fednova"),
                {LATEST: 80.0},
            ),
        ],
        measures=FINAL,
        note="The paper's figures are of 300 rounds of EMNIST, and with digests mixed at random. Its FedDyn "
        "diverged.",
    ),
    "feddig_samples_digits": Table(
        "FedDig, digits, everybody leaves within 20 rounds: samples in a digest, mixing, weights and noise",
        [
            *[
                Row(f"{size} in a digest", "feddig_digits", (*SHORT_DIGESTS, f"digests.per_digest={size}"))
                for size in SIZES
            ],
            Row("4, not spread", "feddig_digits", (*SHORT_DIGESTS, TOGETHER)),
            Row("4, mixed at random", "feddig_digits", (*SHORT_DIGESTS, TOGETHER, RANDOM)),
            Row(
                "4, published noise, nominal epsilon 0.005 (1600 for a sample, were its scale public)",
                "feddig_digits",
                (*SHORT_DIGESTS, "digests.protection=paper", "digests.epsilon=0.005"),
            ),
            *[
                Row(
                    f"{size}, {name}",
                    "feddig_digits",
                    (*SHORT_DIGESTS, f"digests.per_digest={size}", TOGETHER, *noise),
                )
                for size in (4, 16)
                for name, noise in HONEST.items()
            ],
        ],
        measures=FINAL,
        note="Mixed within classes with equal weights, spread at the server, and without noise, unless a row "
        "says otherwise; with honest noise or mixed at random nothing is spread. Labels leave in the clear.",
    ),
    "feddig_sites_digits": Table(
        "FedDig, digits, Dirichlet 0.1: half of the sites leave for good after round 8 of 20",
        [
            Row(f"{count} sites, {name}", "feddig_digits", (*half_leave(count, least), *extra))
            for count, least in ((4, None), (16, None), (64, 2))
            for name, extra in CHEAP
        ],
        measures=FINAL,
    ),
    "feddig_skew_digits": Table(
        "FedDig, digits, everybody leaves within 20 rounds: how unequal the sites are",
        [
            Row(
                f"Dirichlet {alpha}: {name}",
                "feddig_digits",
                (*SHORT, f"data.partition={{kind: dirichlet, alpha: {alpha}}}", *extra),
            )
            for alpha in (0.1, 0.5, 1.0)
            for name, extra in CHEAP
        ],
        measures=FINAL,
    ),
    **tables_of_paper("feddig", {"mean of rounds 251 to 259": rounds_mean(251, 259)}),
}
