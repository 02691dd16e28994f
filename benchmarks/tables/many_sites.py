"""Federated baselines where their papers have them: many small sites, few in a round, unequal steps."""

from benchmarks.paper_claims import Claim
from benchmarks.table import TEN_SEEDS, Measure, Row, Table
from benchmarks.tables.feddig import rounds_mean

EXPERIMENT = "many_sites_fashion_mnist"
LAST_TEN = "mean of the last 10 rounds"
MEASURES: dict[str, Measure] = {LAST_TEN: rounds_mean(51, 60), "mean of all rounds": rounds_mean(1, 60)}
FEDAVG = "FedAvg"
RIVALS = {
    "FedProx (mu 0.1)": ("learner.correction={name: fedprox, mu: 0.1}", "Li et al. 2020, arXiv 1812.06127"),
    "FedNova": ("strategy=fednova", "Wang et al. 2020, arXiv 2007.07481"),
    "SCAFFOLD": ("strategy=scaffold", "Karimireddy et al. 2020, arXiv 1910.06378"),
    "FedDyn (alpha 0.01)": ("strategy={name: feddyn, alpha: 0.01}", "Acar et al. 2021, arXiv 2111.04263"),
    "AdaBest (mu 0.02, beta 0.8)": (
        "strategy={name: adabest, mu: 0.02, beta: 0.8}",
        "Varno et al. 2022, arXiv 2204.13170",
    ),
    "FedDisco (a 0.5, b 0.1)": ("strategy=feddisco", "Ye et al. 2023, arXiv 2305.19229"),
}


def _table(alpha: float) -> Table:
    division = f"data.partition={{kind: dirichlet, alpha: {alpha:g}, min_samples: 2}}"
    return Table(
        f"100 sites of Fashion-MNIST, Dirichlet {alpha:g}, ten of them in a round: federated baselines",
        [
            Row(FEDAVG, EXPERIMENT, (division,)),
            *(Row(label, EXPERIMENT, (division, change)) for label, (change, _) in RIVALS.items()),
        ],
        seeds=TEN_SEEDS,
        measures=MEASURES,
        note="5,000 training images of 14 x 14 pixels, 60 rounds of 5 local epochs, an MLP with 64 hidden "
        "units. Learning rate, and the strengths of FedProx and FedDyn: `choices.md`. Those of AdaBest and "
        "FedDisco were not tried out.",
        claims=[
            Claim(f"{label} over FedAvg ({source})", label, FEDAVG, LAST_TEN)
            for label, (_, source) in RIVALS.items()
        ],
    )


TABLES = {
    "many_sites_fashion_mnist": _table(0.1),
    "many_sites_fashion_mnist_milder": _table(0.5),
}
