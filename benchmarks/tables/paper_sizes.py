"""FedDig and TriCon-SF at the sizes of their papers, as far as these state them; for a machine with a GPU."""

from benchmarks.table import Row, Table, of
from benchmarks.tables.feddig import IMAGE_BRANCH_ONLY, LAST, away

WHOLE = (
    "data={source: pack, path: ../../../shared/data/fashion_mnist.webp.zip, sites: 4, "
    "partition: {kind: dirichlet, alpha: 0.1, min_samples: 10}}"
)
SCENARIOS: dict[str, tuple[int, str]] = {
    "all stay": (100, "absence=[]"),
    "one away from 50 to 100": (260, away((0, 50, 99))),
    "one leaves for good": (260, away((0, 50, None))),
    "all leave, one after the other": (
        260,
        away((0, 100, None), (1, 150, None), (2, 200, None), (3, 250, None)),
    ),
    "two come at 100": (260, away((2, 1, 99), (3, 1, 99))),
}
FEDAVG = ("strategy=fedavg", *IMAGE_BRANCH_ONLY)
HAM10000 = ("data.samples_limit=null", "data.test_limit=null", "tasks.rounds=100")
MEAN_LAST = {"final accuracy": of("final_accuracy")}


def _ham10000(sites: int, alpha: float) -> tuple[str, ...]:
    partition = f"data.partition={{kind: dirichlet, alpha: {alpha:g}, min_samples: 10}}"
    return (*HAM10000, f"data.sites={sites}", partition)


TABLES = {
    "feddig_fashion_mnist_paper": Table(
        "FedDig, Fashion-MNIST whole, 4 sites, Dirichlet 0.1: the scenarios of table I",
        [
            Row(
                f"{scenario}: {name}",
                "feddig_fashion_mnist",
                (WHOLE, f"tasks.rounds={rounds}", absence, "rounds.max_skipped=260", *extra),
            )
            for scenario, (rounds, absence) in SCENARIOS.items()
            for name, extra in (("FedAvg", FEDAVG), ("FedDig", ()))
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=LAST,
        scale="paper",
        note="Rounds and absences are the paper's; its networks and the concentration of its division are "
        "not told. Sites with a fixed share of the samples are not among the divisions here.",
    ),
    "tricon_sf_ham10000_paper": Table(
        "TriCon-SF on HAM10000 at 32 pixels, all training images, 100 rounds: sites and heterogeneity",
        [
            Row(
                f"{name}, {sites} sites, alpha {alpha:g}",
                "tricon_sf_ham10000",
                (*_ham10000(sites, alpha), *extra),
            )
            for sites in (5, 10, 20)
            for alpha in (0.5, 1.0, 10.0)
            for name, extra in (
                ("ring", ()),
                ("FedAvg", ("strategy=fedavg",)),
                ("FedAvg, equal work", ("strategy=fedavg", f"learner.epochs={sites}")),
            )
        ],
        measures=MEAN_LAST,
        scale="paper",
        note="The paper's numbers of sites, segments and rounds are not told; its gene expression data, but "
        "for the one set in tricon_sf_genes, comes from a site that no program may fetch it from.",
    ),
}
