"""Methods inside one another on skin lesions, at the four clinics of HAM10000."""

from collections.abc import Mapping
from typing import Any

from benchmarks.table import Measure, Row, Table, of
from benchmarks.tables.privacy import epsilon

FEDDIG, RING, SAMPLES = "composed_feddig_attention", "composed_ring_memory", "composed_pp_fcil_sample"
CLINICS = (
    "data={source: pack, path: ../../../shared/data/ham10000_32.webp.zip, partition: {kind: natural}, "
    "samples_limit: 2000, test_limit: 600, normalise: {mean: [0.76, 0.55, 0.57], std: [0.14, 0.15, 0.17]}}"
)
TASKS = "tasks={increments: [3, 4], order: seeded, rounds: 6}"
NETWORK = "model={name: mlp, hidden: [64]}"
FEDAVG = "strategy=fedavg"
UNPROTECTED = "privacy={mode: none}"
PARTS = (CLINICS, TASKS, "learner.epochs=1")
PLAIN_SGD = (UNPROTECTED, "learner.optimizer.lr=0.1")
PLAIN_REPLAY = ("model={name: mlp, hidden: [32]}", "learner.distillation=null", FEDAVG)


def balanced(summary: Mapping[str, Any]) -> float | None:
    """Mean over the classes, after the last task; most lesions of HAM10000 are of one class."""
    return summary["balanced_accuracy"][-1]


def _ring(noise_multiplier: float) -> str:
    return (
        f"privacy={{mode: client_local, clip_norm: 1.0, noise_multiplier: {noise_multiplier:g}, "
        "accountant: rdp, delta: 0.001}"
    )


def _feddig(strategy: str) -> tuple[str, ...]:
    absence = "absence=[{site: vidir_modern, first_round: 9}, {site: rosendahl, first_round: 13}]"
    return (
        *(
            CLINICS,
            "tasks={count: 1, order: natural, rounds: 20}",
            absence,
            strategy,
            "evaluation.every=task",
        ),
        "learner.classification=balanced_softmax",
        "model={name: digest_two_branch, backbone: mlp, hidden: [64]}",
    )


DIGESTS = "strategy={{name: digest_synthesis, base: {base}, server_lr: 0.01, guidance_lr: 1.0}}"
STANDARD: dict[str, Measure] = {
    "final balanced accuracy": balanced,
    "final accuracy": of("final_accuracy"),
}
PRIVATE: dict[str, Measure] = {"epsilon": epsilon, **STANDARD}
SIZE = (
    "HAM10000 at 32 pixels, its four clinics as they are, 2,000 training samples in all. Small, so that it "
    "runs on a processor; a constant answer has a balanced accuracy of 14.3 with seven classes."
)

TABLES = {
    "compositions_feddig_ham10000": Table(
        "FedDig around other aggregations, HAM10000: two of four clinics leave for good",
        [
            Row("FedAvg", FEDDIG, _feddig(FEDAVG)),
            Row("layer attention", FEDDIG, _feddig("strategy=layer_attention")),
            Row("FedDig on FedAvg", FEDDIG, _feddig(DIGESTS.format(base="fedavg"))),
            Row("FedDig on layer attention", FEDDIG, _feddig(DIGESTS.format(base="layer_attention"))),
        ],
        measures=STANDARD,
        note=f"{SIZE} 20 rounds of balanced softmax; one clinic each leaves after rounds 8 and 12. "
        "Sizes and loss were chosen on one seed; nothing else was tuned.",
    ),
    "compositions_ring_ham10000": Table(
        "A ring with exemplars, HAM10000, tasks of 3 and 4 classes: noise at the hand-over",
        [
            Row("ring, no protection", RING, (CLINICS, TASKS, NETWORK, UNPROTECTED)),
            Row("ring, noise multiplier 0.03", RING, (CLINICS, TASKS, NETWORK, _ring(0.03))),
            Row("ring, noise multiplier 1", RING, (CLINICS, TASKS, NETWORK, _ring(1))),
            Row("FedAvg, no protection", RING, (CLINICS, TASKS, NETWORK, UNPROTECTED, FEDAVG)),
            Row("FedAvg, noise multiplier 0.03", RING, (CLINICS, TASKS, NETWORK, _ring(0.03), FEDAVG)),
            Row(
                "FedAvg, equal work: 4 local epochs",
                RING,
                (CLINICS, TASKS, NETWORK, UNPROTECTED, FEDAVG, "learner.epochs=4"),
            ),
        ],
        measures=PRIVATE,
        plain=frozenset({"epsilon"}),
        note=f"{SIZE} 6 rounds a task. Unit: a whole clinic; epsilon at delta 0.001, worst case over "
        "clinics. Noise is seeded, so that the runs repeat.",
    ),
    "compositions_samples_ham10000": Table(
        "PP-FCIL's learner under DP-SGD, HAM10000, tasks of 3 and 4 classes",
        [
            Row("the parts that a claim allows, no protection", SAMPLES, (*PARTS, *PLAIN_SGD)),
            Row("the parts that a claim allows, sigma 1", SAMPLES, PARTS),
            Row("plain replay and FedAvg, no protection", SAMPLES, (*PARTS, *PLAIN_SGD, *PLAIN_REPLAY)),
            Row("plain replay and FedAvg, sigma 1", SAMPLES, (*PARTS, *PLAIN_REPLAY)),
        ],
        measures=PRIVATE,
        plain=frozenset({"epsilon"}),
        note=f"{SIZE} 6 rounds a task. Unit: one training sample; epsilon at delta 0.0001, worst case over "
        "clinics. Without protection the learning rate is 0.1, with DP-SGD 0.5. Noise is seeded.",
    ),
}
