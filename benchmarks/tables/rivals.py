"""Federated baselines under one class-incremental learner, and class-incremental baselines beside them."""

from typing import Any

from benchmarks.table import STANDARD, Row, Table


def at_the_sites(summary: dict[str, Any]) -> float:
    """Accuracy of the last model on the sites' own held-out samples, by the learner's classifier."""
    return float(summary["federated_accuracy"][-1])


RIVALS = {
    "FedAvg": "fedavg",
    "FedNova": "fednova",
    "SCAFFOLD": "scaffold",
    "FedDyn (alpha 0.1)": "{name: feddyn, alpha: 0.1}",
    "AdaBest (mu 0.02, beta 0.3)": "{name: adabest, mu: 0.02, beta: 0.3}",
    "FedDisco (a 0.5, b 0.1)": "feddisco",
    "SplitFed v2": "{name: splitfed, version: v2}",
    "cyclic weight transfer": "cyclic_weight_transfer",
}

TABLES = {
    "rivals_digits": Table(
        "Digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.3: baselines",
        [
            *[Row(label, "rivals_digits", (f"strategy={name}",)) for label, name in RIVALS.items()],
            Row("FedProx (mu 0.1)", "rivals_digits", ("learner.correction={name: fedprox, mu: 0.1}",)),
            Row("iCaRL-FedAvg", "icarl_fedavg_digits"),
            Row("LwF-FedAvg", "lwf_fedavg_digits"),
            Row(
                "fine-tuning",
                "lwf_fedavg_digits",
                ("learner.distillation=null", "name=finetune-plain-digits"),
            ),
            Row("centralised, one site", "centralised_digits"),
            Row("joint, one site, all samples", "joint_digits"),
        ],
        measures={**STANDARD, "final accuracy at the sites": at_the_sites},
        note="The first nine rows share one learner (replay, balanced softmax, distillation, plain SGD) and "
        "differ in the strategy alone. SplitFed v1 is FedAvg bit for bit and has no row. iCaRL classifies by "
        "the nearest mean of exemplars at the sites, which have them, and by its head at the server.",
    )
}
