"""Incre-FL: the ablations of its tables 1 to 5 at a size for one processor, beside the uniform mean."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.table import STANDARD, Row, Table

PLAIN = {"model.squeeze_excitation": "false", "strategy": "fedavg", "pretraining": "null"}
"""Changes to an experiment of the whole method that leave iCaRL with federated averaging."""


def at_the_sites(summary: dict[str, Any]) -> Sequence[float]:
    """Accuracy after each task by the sites' own nearest mean of exemplars, all sites' samples together."""
    return summary["federated_accuracy"]


FINAL = "final, nearest mean"
MEASURES = {
    FINAL: lambda summary: at_the_sites(summary)[-1],
    "average incremental, nearest mean": lambda summary: (
        sum(at_the_sites(summary)) / len(at_the_sites(summary))
    ),
    "final, head": STANDARD["final accuracy"],
    "forgetting, head": STANDARD["forgetting"],
}


def rows(experiment: str) -> list[Row]:
    """The five rows of the paper and, for each aggregation, the uniform mean that it has to beat."""

    def row(label: str, **changes: str) -> Row:
        return Row(label, experiment, tuple(f"{key}={value}" for key, value in (PLAIN | changes).items()))

    attention: Mapping[str, str] = {"strategy": "layer_attention"}
    channels: Mapping[str, str] = {"model.squeeze_excitation": "true"}
    return [
        row("iCaRL-FedAvg"),
        row("+ pre-training (table 1)", pretraining="{samples: 64, rounds: 3}"),
        row("+ channel attention (table 3)", **channels),
        row("+ layer attention (table 4)", **attention),
        row("+ both attentions (table 2)", **channels, **attention),
        row("Incre-FL, all three (table 5)", **channels, **attention, pretraining="{samples: 64, rounds: 3}"),
        row("uniform mean in place of layer attention, no channel attention", strategy="uniform_mean"),
        row(
            "uniform mean in place of layer attention, all else as in Incre-FL",
            **{**channels, "strategy": "uniform_mean", "pretraining": "{samples: 64, rounds: 3}"},
        ),
    ]


def early(label: str, *changes: str) -> Row:
    """One task of all classes, cut short."""
    return Row(label, "incre_fl_digits", ("tasks.count=1", *changes))


NOTE = (
    "Per cent. Nearest mean: each site classifies with the means of its own exemplars, as iCaRL does; head: "
    "the classifier on the server's test set. Two sites with equal halves of every class, so that the two "
    "distances are nearly equal and layer attention is close to the mean by construction."
)

TABLES = {
    "incre_fl_digits": Table(
        "Incre-FL on digits, 5 tasks of 2", rows("incre_fl_digits"), measures=MEASURES, note=NOTE
    ),
    "incre_fl_fashion_mnist": Table(
        "Incre-FL on Fashion-MNIST (1000 images of 14 x 14), 5 tasks of 2",
        rows("incre_fl_fashion_mnist"),
        measures=MEASURES,
        note=NOTE,
    ),
    "incre_fl_cifar100_subset": Table(
        "Incre-FL on 20 classes of CIFAR-100 (2000 images of 16 x 16), 4 tasks of 5",
        rows("incre_fl_cifar100_subset"),
        measures=MEASURES,
        note=NOTE,
    ),
    "incre_fl_pretraining": Table(
        "Early rounds of a first task with and without balanced pre-training (digits, all classes)",
        [
            early("2 rounds", "tasks.rounds=2", "pretraining=null"),
            early("3 rounds of pre-training with 64 samples a site, then 2 rounds", "tasks.rounds=2"),
            early("5 rounds", "tasks.rounds=5", "pretraining=null"),
        ],
        seeds=(1, 2, 3, 4, 5),
        measures={"accuracy, head": STANDARD["final accuracy"], "accuracy, nearest mean": MEASURES[FINAL]},
        note="Per cent. What pre-training gains is to be held against as many ordinary rounds.",
    ),
}
