"""FedPerC and its rivals: accuracy of each site's own model, mean over sites, and how well sites are
grouped."""

from typing import Any

from benchmarks.table import Row, Table


def own_models(summary: dict[str, Any]) -> float:
    """Mean over sites of each site's own model on its own held-out samples, after the last round."""
    return float(summary["personalisation"]["accuracy"])


def global_model(summary: dict[str, Any]) -> float:
    """The same of the global model that the personal phase starts from."""
    accuracies = [site["accuracy"] for site in summary["sites"].values()]
    return sum(accuracies) / len(accuracies)


def rand_index(summary: dict[str, Any]) -> float:
    """Adjusted Rand index of the clusters against the groups that the source made."""
    return float(summary["personalisation"]["adjusted_rand"])


NO_CLUSTERS = ("strategy.grouping=random", "strategy.clusters=1")
LAST_LAYER = ("strategy.layers=3", "strategy.combine=last", "strategy.channels=64")
MEASURES = {
    "own models": own_models,
    "global model": global_model,
    "100 x adjusted Rand index": rand_index,
}

VECTORS = {
    "mean of 2 ReLU layers, as published": ("2", "average", "16"),
    "2 layers kept apart": ("2", "concatenate", "16"),
    "the second layer": ("2", "last", "32"),
    "mean of 3 ReLU layers": ("3", "average", "16"),
    "3 layers kept apart": ("3", "concatenate", "16"),
    "the third layer": ("3", "last", "64"),
}
"""layers, combine, channels: all channels that the layers have in common."""

TABLES = {
    "fedperc_synth": Table(
        "FedPerC on synth_groups: 16 sites in 4 groups, 18 global and 6 personal rounds",
        [
            Row("FedPerC, vector of the last ReLU layer", "fedperc_synth", LAST_LAYER),
            Row("FedPerC, as published", "fedperc_synth"),
            Row("FedPerC, true groups", "fedperc_synth", ("strategy.grouping=given",)),
            Row("fine-tuning, equal budget", "fedperc_synth", (*NO_CLUSTERS, "strategy.personal=['*']")),
            Row("FedPer", "fedperc_synth", NO_CLUSTERS),
            Row("FedPerC, random groups", "fedperc_synth", ("strategy.grouping=random",)),
            Row("PFA on the published clusters", "fedperc_synth", ("strategy.personal=[]",)),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures=MEASURES,
        note="Accuracy is the mean over sites on each site's own test samples, after the last round; nothing "
        "is selected on test data. All rows start from the same global model and spend the same rounds and "
        "local epochs. The global model alone is the second column.",
    ),
    "fedperc_vectors": Table(
        "Which sparsity vector finds the groups of synth_groups: 18 global rounds and 1 personal round",
        [
            Row(
                label,
                "fedperc_synth",
                (
                    "tasks.rounds=19",
                    f"strategy.layers={layers}",
                    f"strategy.combine={combine}",
                    f"strategy.channels={channels}",
                ),
            )
            for label, (layers, combine, channels) in VECTORS.items()
        ],
        seeds=(11, 12, 13, 14, 15),
        measures={"100 x adjusted Rand index": rand_index},
        note="The vector of the third layer was chosen by this table; the seeds of fedperc_synth are others.",
    ),
}
