"""Incre-FL: the ablations of its tables 1 to 5 beside the uniform mean, small and at the paper's size."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper_claims import Claim
from benchmarks.paper_sheets import tables_of_paper
from benchmarks.table import STANDARD, TEN_SEEDS, Row, Table
from perennial.server.metrics import average_incremental_accuracy

PLAIN = {"model.squeeze_excitation": "false", "strategy": "fedavg", "pretraining": "null"}
"""Changes to an experiment of the whole method that leave iCaRL with federated averaging."""


def at_the_sites(summary: dict[str, Any]) -> Sequence[float | None]:
    """Accuracy after each task by the sites' own nearest mean of exemplars, all sites' samples together."""
    return summary["federated_accuracy"]


FINAL = "final, nearest mean"
MEASURES = {
    FINAL: lambda summary: at_the_sites(summary)[-1],
    "average incremental, nearest mean": lambda summary: average_incremental_accuracy(at_the_sites(summary)),
    "final, head": STANDARD["final accuracy"],
    "forgetting, head": STANDARD["forgetting"],
}


BASE, PRETRAINED, CHANNELS, LAYERS, BOTH, ALL, MEAN, MEAN_IN_ALL = (
    "iCaRL-FedAvg",
    "+ pre-training (table 1)",
    "+ channel attention (table 3)",
    "+ layer attention (table 4)",
    "+ both attentions (table 2)",
    "Incre-FL, all three (table 5)",
    "uniform mean in place of layer attention, no channel attention",
    "uniform mean in place of layer attention, all else as in Incre-FL",
)
SIGMOIDS = "Incre-FL, all three, with iCaRL's sigmoids as printed"
NEAR, CLIENT_MEAN, EXCLUDE, CENTRAL = (
    "Incre-FL, near sites trusted (sign -1, distances by their mean)",
    "Incre-FL, distances of the head from the sites' mean",
    "Incre-FL, pre-training samples left out afterwards",
    "iCaRL with all data in one place",
)


def rows(experiment: str) -> list[Row]:
    """The five rows of the paper, what they add to, and for each aggregation the uniform mean to beat."""

    def row(label: str, **changes: str) -> Row:
        return Row(label, experiment, tuple(f"{key}={value}" for key, value in (PLAIN | changes).items()))

    attention: Mapping[str, str] = {"strategy": "layer_attention"}
    channels: Mapping[str, str] = {"model.squeeze_excitation": "true"}
    pretraining: Mapping[str, str] = {"pretraining": "{samples: 7, rounds: 3}"}
    return [
        row(BASE),
        row(PRETRAINED, **pretraining),
        row(CHANNELS, **channels),
        row(LAYERS, **attention),
        row(BOTH, **channels, **attention),
        row(ALL, **channels, **attention, **pretraining),
        row(MEAN, strategy="uniform_mean"),
        row(MEAN_IN_ALL, **{**channels, **pretraining, "strategy": "uniform_mean"}),
    ]


def variants(experiment: str, sigmoid_rate: float) -> list[Row]:
    """What the paper prints or leaves open, each one change of the whole method, and all data in one place.

    sigmoid_rate: learning rate of iCaRL's sigmoids, whose gradients are small.
    """
    sigmoids = (
        "learner.classification=icarl_bce",
        f"learner.optimizer={{name: sgd, lr: {sigmoid_rate}, weight_decay: 1.0e-5}}",
    )
    return [
        Row(SIGMOIDS, experiment, sigmoids),
        Row(NEAR, experiment, ("strategy={name: layer_attention, sign: -1, scale: mean}",)),
        Row(CLIENT_MEAN, experiment, ("strategy={name: layer_attention, head_query: client_mean}",)),
        Row(EXCLUDE, experiment, ("pretraining={samples: 7, rounds: 3, exclude: true}",)),
        Row(CENTRAL, experiment, ("data.sites=1", "data.partition={kind: iid}", "pretraining=null")),
    ]


CLAIMS = (
    *(
        Claim(f"{part} over iCaRL-FedAvg (table {number})", row, BASE, FINAL)
        for part, number, row in (
            ("pre-training", 1, PRETRAINED),
            ("channel attention", 3, CHANNELS),
            ("layer attention", 4, LAYERS),
            ("both attentions", 2, BOTH),
            ("all three", 5, ALL),
        )
    ),
    Claim("layer attention over the uniform mean, nothing else added (ours)", LAYERS, MEAN, FINAL),
    Claim("layer attention over the uniform mean, all else added (ours)", ALL, MEAN_IN_ALL, FINAL),
)
"""What the paper says of its rows; and, as its gain may be that of ignoring sample counts, ours."""

CPU_CLAIMS = (
    *CLAIMS,
    Claim("a balanced softmax over iCaRL's sigmoids (ours)", ALL, SIGMOIDS, FINAL),
    Claim("layer attention that trusts the near over one that trusts the far (ours)", NEAR, ALL, FINAL),
)
CPU_NOTE = (
    "Per cent. Nearest mean: each site classifies with the means of its own exemplars, as iCaRL does; head: "
    "the classifier on the server's test set. Four sites, Dirichlet 0.5, so that sites differ and layer "
    "attention can matter. The paper trains with iCaRL's sigmoids, one row below, whose small gradients have "
    "ten to twenty times the learning rate of the others, without momentum; the others have a balanced "
    "softmax, and all have group normalisation, chosen on seed 11. The row with all data in one place has "
    "channel attention."
)


def early(label: str, *changes: str) -> Row:
    """One task of all classes, cut short."""
    return Row(label, "incre_fl_digits", ("tasks.count=1", *changes))


TABLES = {
    **tables_of_paper("incre_fl", MEASURES, CLAIMS),
    "incre_fl_digits": Table(
        "Incre-FL on digits, the paper's network, 5 tasks of 2",
        [*rows("incre_fl_digits"), *variants("incre_fl_digits", 0.5)],
        measures=MEASURES,
        note=CPU_NOTE,
        claims=CPU_CLAIMS,
        seeds=TEN_SEEDS,
    ),
    "incre_fl_fashion_mnist": Table(
        "Incre-FL on Fashion-MNIST (1000 images of 14 x 14), 5 tasks of 2",
        [*rows("incre_fl_fashion_mnist"), *variants("incre_fl_fashion_mnist", 0.5)],
        measures=MEASURES,
        note=CPU_NOTE,
        claims=CPU_CLAIMS,
        seeds=TEN_SEEDS,
    ),
    "incre_fl_cifar100_subset": Table(
        "Incre-FL on 20 classes of CIFAR-100 (1000 images of 16 x 16), 4 tasks of 5",
        [*rows("incre_fl_cifar100_subset"), *variants("incre_fl_cifar100_subset", 1.0)],
        measures=MEASURES,
        note=CPU_NOTE,
        claims=CPU_CLAIMS,
        seeds=TEN_SEEDS,
    ),
    "incre_fl_pretraining": Table(
        "Early rounds of a first task with and without balanced pre-training (digits, all classes)",
        [
            early("2 rounds", "tasks.rounds=2", "pretraining=null"),
            early("3 rounds of pre-training with 7 samples a site, then 2 rounds", "tasks.rounds=2"),
            early("5 rounds", "tasks.rounds=5", "pretraining=null"),
        ],
        measures={"accuracy, head": STANDARD["final accuracy"], "accuracy, nearest mean": MEASURES[FINAL]},
        seeds=TEN_SEEDS,
        note="Per cent. What pre-training gains is to be held against as many ordinary rounds.",
    ),
}
