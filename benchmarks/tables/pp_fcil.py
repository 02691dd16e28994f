"""PP-FCIL: its parts, its weights, the printed sign, protection, and two real data sets."""

from typing import Any

from benchmarks.table import STANDARD, Measure, Row, Table

CENTRAL = "evaluation.federated=false"
"""Only the server's test set counts in these tables; sites need not measure too."""
AT_SITES = "evaluation.central=false"
REDUCED = "data.samples_limit=2000"
DIGITS = "pp_fcil_digits"
PLAIN = (
    "learner.classification=ce",
    "learner.distillation=null",
    "learner.contrastive=null",
    "model={name: small_cnn}",
)
NO_INCREMENTAL_PARTS = (*PLAIN, "learner.memory=null")


def balanced_incremental(summary: dict[str, Any]) -> float:
    """Mean over tasks of the balanced accuracy on all classes seen so far."""
    rows = summary["balanced_accuracy"]
    return sum(rows) / len(rows)


def epsilon(summary: dict[str, Any]) -> float:
    """In hundredths, because a table prints a hundred times a measure."""
    return summary["epsilon"]["value"] / 100


BALANCED: dict[str, Measure] = {
    "final balanced accuracy": lambda summary: summary["balanced_accuracy"][-1],
    "average incremental balanced accuracy": balanced_incremental,
    **STANDARD,
}


def _row(label: str, experiment: str, *changes: str) -> Row:
    return Row(label, experiment, (CENTRAL, *changes))


def _private(noise_multiplier: float) -> Row:
    return _row(
        f"noise multiplier {noise_multiplier:g}",
        DIGITS,
        "strategy={name: multi_factor, alpha: 1, beta: 0, gamma: 0, delta: 0}",
        f"privacy={{mode: client_local, clip_norm: 1.0, noise_multiplier: {noise_multiplier:g}, "
        "noise_source: seeded, accountant: rdp}",
    )


TABLES = {
    "pp_fcil_digits": Table(
        "PP-FCIL on digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5: its parts and its weights",
        [
            _row("full system", DIGITS),
            _row("without distillation", DIGITS, "learner.distillation=null"),
            _row("without contrastive term", DIGITS, "learner.contrastive=null"),
            _row("without balanced softmax", DIGITS, "learner.classification=ce"),
            _row("without dual backbone", DIGITS, "model={name: small_cnn}"),
            _row("plain replay: exemplars and cross entropy alone", DIGITS, *PLAIN),
            _row("without incremental parts: fine-tuning", DIGITS, *NO_INCREMENTAL_PARTS),
            _row(
                "weights: size alone, as FedAvg",
                DIGITS,
                "strategy={name: multi_factor, beta: 0, gamma: 0, delta: 0}",
            ),
            _row("weights: without recency", DIGITS, "strategy.beta=0"),
            _row("weights: without held-out accuracy", DIGITS, "strategy.gamma=0"),
            _row("weights: without inverse loss", DIGITS, "strategy.delta=0"),
        ],
        note="Every row is the first one but for what its name says.",
    ),
    "pp_fcil_sign_digits": Table(
        "The sign of balanced softmax, digits, 5 sites with equal shares of every class",
        [
            _row("log-prior added", DIGITS, "data.partition={kind: iid}"),
            _row(
                "log-prior subtracted, as printed",
                DIGITS,
                "data.partition={kind: iid}",
                "learner.classification={name: balanced_softmax, sign: -1}",
            ),
        ],
        note="Equal shares, because a site without samples of a class cannot subtract the logarithm of 0.",
    ),
    "pp_fcil_privacy_digits": Table(
        "PP-FCIL on digits with noise at each site (unit: one whole site, adversary: the server)",
        [_private(0.01), _private(0.1), _private(1.0)],
        measures={**STANDARD, "epsilon at delta 1e-5 (a number, not per cent)": epsilon},
        note="Clip norm 1, 30 rounds, Renyi accountant, effective multiplier half the noise multiplier.",
    ),
    "pp_fcil_fashion_mnist": Table(
        "PP-FCIL on 3,000 samples of Fashion-MNIST, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5",
        [
            _row("full system", "pp_fcil_fashion_mnist"),
            _row("without distillation", "pp_fcil_fashion_mnist", "learner.distillation=null"),
            _row("plain replay", "pp_fcil_fashion_mnist", *PLAIN),
            _row("fine-tuning", "pp_fcil_fashion_mnist", *NO_INCREMENTAL_PARTS),
        ],
    ),
    "pp_fcil_ham10000": Table(
        "HAM10000, four clinics as they are, tasks of 3, 2 and 2 classes, 20 exemplars of a class at each",
        [
            Row("PP-FCIL", "pp_fcil_ham10000", (AT_SITES, REDUCED)),
            Row("iCaRL-FedAvg", "icarl_fedavg_ham10000", (AT_SITES, REDUCED)),
            Row(
                "PP-FCIL, classifying as iCaRL does",
                "pp_fcil_ham10000",
                (AT_SITES, REDUCED, "learner.classifier=nearest_mean"),
            ),
        ],
        measures=BALANCED,
        note="2,000 of the 7,994 training samples, class by class in proportion. Measured at the clinics "
        "on what each held out: there iCaRL can classify by the nearest mean of the clinic's own exemplars.",
    ),
}
