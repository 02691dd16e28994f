"""TriCon-SF: a serial ring beside averaging, with equal rounds and with equal work, and who is flagged."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from benchmarks.table import Measure, Row, Table, of

TARGET = 0.85
CHEATS = ("site-2", "site-5")


def last_rounds(summary: Mapping[str, Any]) -> float:
    """Mean accuracy of the last five rounds: a ring's model moves with the site that came last."""
    return mean(summary["accuracy_by_round"][-5:])


def rounds_to_target(summary: Mapping[str, Any]) -> float:
    """Rounds until the target, in hundredths because a table shows per cent; never: the rounds of the run."""
    accuracy = summary["accuracy_by_round"]
    reached = [number for number, value in enumerate(accuracy, 1) if value >= TARGET]
    return min(reached, default=len(accuracy)) / 100


def megabytes_to_target(summary: Mapping[str, Any]) -> float:
    """Megabytes sent until then, both ways, in hundredths."""
    return summary["bytes_by_round"][round(100 * rounds_to_target(summary)) - 1] / 1e8


def reached_target(summary: Mapping[str, Any]) -> float:
    """Whether any round reached the target."""
    return float(max(summary["accuracy_by_round"]) >= TARGET)


def cheats_flagged(summary: Mapping[str, Any]) -> float:
    """Share of the cheating sites that are flagged."""
    return mean(summary["contribution"][site]["flag"] is not None for site in CHEATS)


def others_flagged(summary: Mapping[str, Any]) -> float:
    """Number of other sites that are flagged, in hundredths."""
    contribution = summary["contribution"]
    return sum(entry["flag"] is not None for site, entry in contribution.items() if site not in CHEATS) / 100


def valuation_cost(summary: Mapping[str, Any]) -> float:
    """Time for the valuation as a share of the time for everything else in the rounds."""
    return summary["valuation"]["share_of_other_work"]


ACCURACY: Mapping[str, Measure] = {"last 5 rounds": last_rounds, "final accuracy": of("final_accuracy")}
ROUNDS: Mapping[str, Measure] = {
    **ACCURACY,
    "runs that reach 85 %": reached_target,
    "rounds to 85 %": rounds_to_target,
    "MB to 85 %": megabytes_to_target,
    "MB in all": lambda summary: (summary["bytes_up"] + summary["bytes_down"]) / 1e8,
}
FLAGS: Mapping[str, Measure] = {
    "cheats flagged": cheats_flagged,
    "other sites flagged (number)": others_flagged,
    "final accuracy": of("final_accuracy"),
    "valuation / other work": valuation_cost,
}
CHEATING = (
    "data.sites=8",
    "data.partition.alpha=1.0",
    "tasks.rounds=15",
    "evaluation.every=task",
)
ADVERSARIES = "adversaries=[{site: site-2, kind: free_rider}, {site: site-5, kind: label_flip}]"
CYCLIC = "strategy={name: serial_ring, segments: 1, reshuffle: never, relabel: none}"


def _genes(sites: int) -> list[Row]:
    change = f"data.sites={sites}"
    return [
        Row(f"{sites} sites, ring", "tricon_sf_genes", (change,)),
        Row(f"{sites} sites, FedAvg", "tricon_sf_genes", (change, "strategy=fedavg")),
    ]


TABLES = {
    "tricon_sf_digits": Table(
        "Digits, 10 sites, Dirichlet 0.5, 10 rounds: one model handed round beside one model averaged",
        [
            Row("ring, new order each sweep", "tricon_sf_digits"),
            Row("FedAvg, equal rounds", "fedavg_dirichlet_digits"),
            Row("ring, fixed order", "tricon_sf_digits", ("strategy.base.reshuffle=never",)),
            Row("FedAvg, equal work: 10 local epochs", "fedavg_dirichlet_digits", ("learner.epochs=10",)),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=ROUNDS,
        note=(
            "One local epoch a round. A ring makes as many optimiser passes over one model in a round as "
            "there are sites, one after the other; FedAvg makes one, at all sites at once. The row of equal "
            "work gives FedAvg as many. A run that never reaches 85 % counts with all its rounds."
        ),
    ),
    "tricon_sf_digits_30": Table(
        "Digits, 10 sites, Dirichlet 0.5, 30 rounds: how far averaging catches up",
        [
            Row("ring, new order each sweep", "tricon_sf_digits", ("tasks.rounds=30",)),
            Row("FedAvg, equal rounds", "fedavg_dirichlet_digits", ("tasks.rounds=30",)),
        ],
        seeds=(1, 2, 3),
        measures=ROUNDS,
        note="A run that never reaches 85 % counts with all its rounds.",
    ),
    "tricon_sf_detection": Table(
        "Digits, 8 sites, Dirichlet 1.0, 15 rounds of 4 sweeps: who adds nothing, and who does harm",
        [
            Row("a free-rider and a label-flipper", "tricon_sf_digits", (*CHEATING, ADVERSARIES)),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=FLAGS,
        note=(
            "The cheats are site-2, which returns what it gets, and site-5, which calls every class another "
            "one."
        ),
    ),
    "tricon_sf_digits_rivals": Table(
        "Digits, 10 sites, Dirichlet 0.5, 10 rounds: one segment, cyclic weight transfer, FedProx",
        [
            Row("ring, 1 segment", "tricon_sf_digits", ("strategy.base.segments=1",)),
            Row("cyclic weight transfer", "tricon_sf_digits", (CYCLIC,)),
            Row(
                "FedProx, equal rounds",
                "fedavg_dirichlet_digits",
                ("learner.correction={name: fedprox, mu: 0.01}",),
            ),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=ROUNDS,
        note="Cyclic weight transfer is a ring of 1 segment in a fixed order.",
    ),
    "tricon_sf_exclusion": Table(
        "Digits, 8 sites, Dirichlet 1.0, 15 rounds of 4 sweeps: excluding flagged sites, and false alarms",
        [
            Row(
                "a free-rider and a label-flipper, excluded",
                "tricon_sf_digits",
                (*CHEATING, ADVERSARIES, "strategy.on_flag=exclude"),
            ),
            Row("nobody cheats", "tricon_sf_digits", CHEATING),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=FLAGS,
        note="In the last row site-2 and site-5 are honest, and flagging them is an error.",
    ),
    "tricon_sf_genes": Table(
        "Gene expression (su: 102 samples, 5565 genes, 4 tumours), Dirichlet 0.5, 20 rounds",
        [row for sites in (2, 5, 10) for row in _genes(sites)],
        seeds=(1, 2, 3, 4, 5),
        measures=ACCURACY,
        note="About 20 test samples: one of them is 5 points.",
    ),
    "tricon_sf_ham10000": Table(
        "HAM10000 at 32x32, 2000 training images, 10 sites, Dirichlet 0.5, 10 rounds",
        [
            Row("ring", "tricon_sf_ham10000"),
            Row("FedAvg, equal rounds", "tricon_sf_ham10000", ("strategy=fedavg",)),
        ],
        seeds=(1, 2, 3),
        measures=ACCURACY | {"bytes in GB": lambda s: (s["bytes_up"] + s["bytes_down"]) / 1e11},
    ),
}
