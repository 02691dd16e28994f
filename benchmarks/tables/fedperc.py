"""FedPerC and its rivals: the mean accuracy of the sites' own models, and how well sites are grouped."""

from collections.abc import Sequence
from typing import Any

from benchmarks.paper_claims import Claim
from benchmarks.paper_sheets import tables_of_paper
from benchmarks.table import TEN_SEEDS, Row, Table


def own_models(summary: dict[str, Any]) -> float:
    """Mean over sites of each site's own model on its own held-out samples, after the last round.

    Where sites have no model of their own, the global model counts.
    """
    own = summary.get("personalisation")
    return global_model(summary) if own is None else float(own["accuracy"])


def global_model(summary: dict[str, Any]) -> float:
    """The same of the global model that the personal phase starts from."""
    accuracies = [site["accuracy"] for site in summary["sites"].values()]
    return sum(accuracies) / len(accuracies)


def rand_index(summary: dict[str, Any]) -> float:
    """Adjusted Rand index of the clusters against the known groups.

    One model for all is one cluster, whose index is 0.
    """
    own = summary.get("personalisation")
    return 0.0 if own is None else float(own["adjusted_rand"])


def rivals(experiment: str, random_clusters: int) -> list[Row]:
    """FedPerC and what it is compared with, from one experiment file."""
    random = ("strategy.grouping=random", f"strategy.clusters={random_clusters}")
    everything = ("strategy.personal=['*']",)
    return [
        Row("FedPerC", experiment),
        Row("FedPerC, the published vector", experiment, PUBLISHED_VECTOR),
        Row("FedPerC, true groups", experiment, ("strategy.grouping=fixed",)),
        Row("FedPerC, random groups", experiment, random),
        Row("fine-tuning, equal budget", experiment, (*NO_CLUSTERS, *everything)),
        Row("FedPer", experiment, NO_CLUSTERS),
        Row("PFA on the same clusters", experiment, ("strategy.personal=[]",)),
        Row("global model, equal budget", experiment, ("strategy=fedavg",)),
    ]


def above(better: str, worse: Sequence[str], source: str = "") -> list[Claim]:
    """That `better` exceeds each of the rivals. source: of the claim, where a paper makes it."""
    return [
        Claim(f"{better}: above {rival}{f' ({source})' if source else ''}", better, rival, "own models")
        for rival in worse
    ]


NO_CLUSTERS = ("strategy.grouping=random", "strategy.clusters=1")
PUBLISHED_VECTOR = ("strategy.layers=3", "strategy.combine=average", "strategy.channels=16")
"""The mean over the first three ReLU layers, of 16 channels: the paper takes 32, our first layer has 16."""
PUBLISHED = "Yang et al. 2022, tables III to VI"
CLUSTER_FREE = ("fine-tuning, equal budget", "FedPer", "FedPerC, random groups")
RIVALS = (*CLUSTER_FREE, "PFA on the same clusters", "global model, equal budget")
MEASURES = {
    "own models": own_models,
    "global model": global_model,
    "100 x adjusted Rand index": rand_index,
}

TABLES = {
    "fedperc_synth": Table(
        "FedPerC on synth_groups: 16 sites in 4 groups, 18 global and 6 personal rounds",
        rivals("fedperc_synth", 4),
        measures=MEASURES,
        note="Accuracy is the mean over sites on each site's own test samples, after the last round; nothing "
        "is selected on test data. All rows have the same rounds and local epochs; the second column is the "
        "global model that the others start from.",
        claims=[
            *above("FedPerC", RIVALS, PUBLISHED),
            *above("FedPerC, the published vector", RIVALS, PUBLISHED),
            *above("FedPerC", ("FedPerC, the published vector",)),
            *above("FedPerC, true groups", CLUSTER_FREE, "what groups are worth, ours"),
            Claim(
                "FedPerC: less than 1 point below the true groups",
                "FedPerC",
                "FedPerC, true groups",
                "own models",
                margin=-1.0,
            ),
        ],
        seeds=TEN_SEEDS,
    ),
    "fedperc_cifar100": Table(
        "FedPerC on CIFAR-100, 20 sites in 4 groups, cut to fit a CPU: 6 global and 4 personal rounds",
        rivals("fedperc_cifar100", 4),
        measures=MEASURES,
        claims=above("FedPerC", RIVALS, PUBLISHED),
        note="100 training samples at a site where the paper has up to 1,000, images of 16 pixels, a network "
        "of two convolutions where the paper has ResNet-34 and MobileNetV1.",
        seeds=TEN_SEEDS,
    ),
    "fedperc_ham10000": Table(
        "FedPerC at the four sites of HAM10000 as they are, 6 global and 4 personal rounds",
        rivals("fedperc_ham10000", 2),
        measures=MEASURES,
        claims=above("FedPerC", RIVALS, PUBLISHED),
        note="1,600 of the training samples, images of 16 pixels. The number of clusters is found from the "
        "vectors. True groups are the two institutions: one practice in Australia, three collections of "
        "Vienna.",
        seeds=TEN_SEEDS,
    ),
    **tables_of_paper(
        "fedperc",
        MEASURES,
        [
            Claim(
                f"FedPerC at least 3.3 points above PFA ({PUBLISHED})",
                "FedPerC",
                "PFA on the same clusters",
                "own models",
                margin=3.3,
            )
        ],
    ),
}
