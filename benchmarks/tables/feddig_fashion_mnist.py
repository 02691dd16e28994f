"""FedDig on Fashion-MNIST: the scenarios of its paper, other methods alone and under it, and honest noise."""

from benchmarks.table import TEN_SEEDS, Row, Table
from benchmarks.tables.feddig import (
    BASE,
    BY_SCENARIO,
    FINAL,
    HONEST,
    IMAGE_BRANCH_ONLY,
    LAST,
    LATEST,
    METHODS,
    NEVER_STOP,
    PAPER,
    PROXIMAL,
    SCENARIOS,
    SEQUENTIAL,
    TOGETHER,
    rounds_mean,
)

FASHION = "feddig_fashion_mnist"
ALONE = (*IMAGE_BRANCH_ONLY, NEVER_STOP)
SMALL = "1,000 images, 20 rounds; the paper's figures are of 300 rounds of EMNIST."


def _alone(label: str, *changes: str, paper: float | None = None) -> Row:
    return Row(label, FASHION, (*ALONE, *changes), {} if paper is None else {SEQUENTIAL: paper})


TABLES = {
    "feddig_scenarios_fashion_mnist": Table(
        "FedDig, Fashion-MNIST: the other scenarios of table I",
        [
            Row(f"{scenario}: {name}", FASHION, (change, *extra), {LATEST: PAPER[scenario][index]})
            for scenario, change in SCENARIOS.items()
            for index, (name, extra) in enumerate(METHODS)
        ],
        measures={**FINAL, "mean of rounds 7 to 13": rounds_mean(7, 13)},
        note=SMALL,
        claims=BY_SCENARIO,
        seeds=TEN_SEEDS,
    ),
    "feddig_bases_fashion_mnist": Table(
        "FedDig, Fashion-MNIST, everybody leaves: other methods alone, FedDig on them, and with honest noise",
        [
            _alone("FedAvg", *BASE, paper=51.6),
            _alone("FedProx (mu 0.01)", *BASE, PROXIMAL, paper=51.8),
            _alone("FedNova", "strategy=fednova", paper=53.0),
            _alone("FedDyn (alpha 0.1)", "strategy={name: feddyn, alpha: 0.1}"),
            _alone(
                "AdaBest (mu 0.02, beta 0.3)", "strategy={name: adabest, mu: 0.02, beta: 0.3}", paper=47.0
            ),
            Row("FedDig on FedAvg", FASHION, (), {SEQUENTIAL: 77.6}),
            Row("FedDig on FedProx (mu 0.01)", FASHION, (PROXIMAL,), {SEQUENTIAL: 77.2}),
            Row("FedDig on FedNova", FASHION, ("strategy.base=fednova",), {SEQUENTIAL: 80.0}),
            *[
                Row(f"FedDig on FedAvg, {name}", FASHION, (TOGETHER, *noise))
                for name, noise in HONEST.items()
            ],
        ],
        measures=LAST,
        note=f"{SMALL} Its digests were mixed at random, and its FedDyn diverged. Here the server spreads "
        "digests, but not those with honest noise.",
    ),
}
