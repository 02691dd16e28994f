"""PP-FCIL: its parts, its weights, the printed sign, protection, and three real data sets.

The paper: Varalakshmi et al. 2026, doi 10.38124/ijisrt/26apr1499.
"""

from typing import Any

from benchmarks.paper_claims import Claim
from benchmarks.paper_sheets import tables_of_paper
from benchmarks.table import STANDARD, TEN_SEEDS, Measure, Row, Table
from benchmarks.tables.privacy import epsilon
from perennial.server.metrics import average_incremental_accuracy

CENTRAL = "evaluation.federated=false"
"""Only the server's test set counts in these tables; sites need not measure too."""
AT_SITES = "evaluation.central=false"
REDUCED = "data.samples_limit=2000"
DIGITS, FASHION = "pp_fcil_digits", "pp_fcil_fashion_mnist"
PLAIN_LEARNER = ("learner.classification=ce", "learner.distillation=null", "learner.contrastive=null")
ONE_BACKBONE_ALONE, GROUPED = "model={name: small_cnn}", "model={name: small_cnn, norm: group}"
PLAIN = (*PLAIN_LEARNER, ONE_BACKBONE_ALONE, "strategy=fedavg")
"""Nothing of the method but its exemplars."""
BALANCED_ALONE = (*PLAIN_LEARNER[1:], ONE_BACKBONE_ALONE, "strategy=fedavg")
"""The control of every comparison with plain replay: one line of loss more."""
TWENTY = (
    *("apple", "bed", "bicycle", "bottle", "bus", "castle", "chair", "cloud", "clock", "dolphin"),
    *("elephant", "forest", "leopard", "motorcycle", "orange", "plain", "rocket", "skyscraper"),
    *("sunflower", "tractor"),
)
"""Classes of CIFAR-100."""
NO_INCREMENTAL_PARTS = (*PLAIN_LEARNER, ONE_BACKBONE_ALONE, "learner.memory=null")


def balanced_incremental(summary: dict[str, Any]) -> float | None:
    """Mean over tasks of the balanced accuracy on all classes seen so far."""
    return average_incremental_accuracy(summary["balanced_accuracy"])


AVERAGE_BALANCED = "average incremental balanced accuracy"
BALANCED: dict[str, Measure] = {
    "final balanced accuracy": lambda summary: summary["balanced_accuracy"][-1],
    AVERAGE_BALANCED: balanced_incremental,
    **STANDARD,
}


HAM, ICARL, ICARL_EQUALLY = "PP-FCIL", "iCaRL-FedAvg", "iCaRL-FedAvg, every class drawn equally often"
SIZE_ALONE = "strategy={name: multi_factor, beta: 0, gamma: 0, delta: 0}"
FULL, PLAIN_REPLAY, BALANCED_REPLAY, FINE_TUNING = (
    "full system",
    "plain replay: exemplars and cross entropy alone",
    "balanced softmax alone",
    "without incremental parts: fine-tuning",
)
TABLE_4 = {
    "without distillation": "distillation",
    "without contrastive term": "the contrastive term",
    FINE_TUNING: "the incremental parts",
}
"""Rows that the paper has too, and what it claims to be worth something."""


def _row(label: str, experiment: str, *changes: str) -> Row:
    return Row(label, experiment, (CENTRAL, *changes))


def _private(noise_multiplier: float) -> Row:
    return _row(
        f"noise multiplier {noise_multiplier:g}",
        DIGITS,
        SIZE_ALONE,
        f"privacy={{mode: client_local, clip_norm: 1.0, noise_multiplier: {noise_multiplier:g}, "
        "accountant: rdp}",
    )


CBDR = (
    "model={name: small_cnn}",
    "learner.classification={name: task_temperatures}",
    "learner.distillation=null",
    "learner.contrastive=null",
    "learner.memory.selection=random",
    "strategy=fedavg",
)
DATA = (
    "data.sites=5",
    "data.partition={kind: dirichlet, alpha: 0.5, min_samples: 10}",
    "data.test_fraction=0.2",
)
"""Of pp_fcil_digits; GLFC, TARGET and iCaRL get the same data."""
TASKS = "{tasks} tasks: {row}"
ICARL_DIGITS, GLFC, FEDCBDR, TARGET = (
    "iCaRL-FedAvg",
    "GLFC's learner, no proxy",
    "FedCBDR",
    "TARGET, no exemplars",
)
CONSOLIDATION = "learner.consolidation={weight: 1, share: 0.17}"
"""The last of six rounds; chosen by benchmarks/tried_settings.py."""
PRINTED, NEAREST, COVERAGE, TRAINED, ONE_BACKBONE = (
    "contrastive term with positives inside the logarithm, as printed",
    "exemplars nearest to their mean, as printed",
    "weights: share of classes in place of recency",
    "weights: training accuracy, as the abstract has it",
    "fused features distilled into one backbone",
)


def _controls(*changes: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Label and changes of both controls, in the method's rounds, memory and optimiser. changes: for both."""
    return (PLAIN_REPLAY, (*PLAIN, *changes)), (BALANCED_REPLAY, (*BALANCED_ALONE, *changes))


def _task_sweep(
    title: str,
    experiment: str,
    counts: tuple[int, ...],
    *changes: str,
    network: str = ONE_BACKBONE_ALONE,
) -> Table:
    """Full system and its controls by number of tasks, in the same rounds altogether.

    network: a change, to the method's network with one backbone.
    """
    return Table(
        title,
        [
            _row(
                TASKS.format(tasks=count, row=label),
                experiment,
                *changes,
                f"tasks={{count: {count}, order: seeded, rounds: {30 // count}}}",
                *extra,
            )
            for count in counts
            for label, extra in ((FULL, ()), *_controls(network))
        ],
        note="30 rounds in every row (20 with 20 tasks), divided among its tasks. The controls have the same "
        "memory and optimiser, one backbone, and weights by size alone.",
        seeds=TEN_SEEDS,
        claims=[
            Claim(
                f"full system over {short}, {count} tasks",
                TASKS.format(tasks=count, row=FULL),
                TASKS.format(tasks=count, row=control),
                "final accuracy",
            )
            for count in counts
            for short, control in (("plain replay", PLAIN_REPLAY), (BALANCED_REPLAY, BALANCED_REPLAY))
        ],
    )


TABLES = {
    "pp_fcil_variants_digits": Table(
        "PP-FCIL on digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5: what is printed or left open",
        [
            _row(FULL, DIGITS),
            _row(PRINTED, DIGITS, "learner.contrastive.form=in"),
            _row(NEAREST, DIGITS, "learner.memory.selection=nearest"),
            _row(COVERAGE, DIGITS, "strategy.timeliness=coverage"),
            _row(TRAINED, DIGITS, "strategy.quality=train"),
            _row(ONE_BACKBONE, DIGITS, CONSOLIDATION),
        ],
        note="Every row is the first one but for what its name says.",
        claims=[
            Claim("positives outside the logarithm over inside", FULL, PRINTED, "final accuracy"),
            Claim("herding over nearest to the mean", FULL, NEAREST, "final accuracy"),
            Claim("share of classes over recency, nobody late", COVERAGE, FULL, "final accuracy"),
            Claim("held-out over training accuracy", FULL, TRAINED, "final accuracy"),
            Claim(f"{ONE_BACKBONE} over the full system", ONE_BACKBONE, FULL, "final accuracy"),
        ],
        seeds=TEN_SEEDS,
    ),
    "pp_fcil_rivals_digits": Table(
        "PP-FCIL and rivals on digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5, equal memory",
        [
            _row(FULL, DIGITS),
            Row(ICARL_DIGITS, "icarl_fedavg_digits", (*DATA, AT_SITES)),
            _row(GLFC, "glfc_digits", *DATA),
            _row(
                FEDCBDR,
                DIGITS,
                *CBDR,
                "learner.optimizer={name: sgd, lr: 0.1}",
            ),
            _row(TARGET, "target_digits", *DATA),
        ],
        note="4 exemplars of a class at each site; TARGET has none, and as many made inputs as its own "
        "experiment says. iCaRL-FedAvg is measured at the sites, which have its class means. FedCBDR (Qi et "
        "al. 2025, arXiv 2507.07712) by its description: temperatures and weights of old and new classes, in "
        "the middle of the paper's ranges, and exemplars drawn within each class. Its leverage scores are "
        "left out: they need features of every sample of every site at the server, and here, where a class "
        "has fewer samples at a site than features, a site's own scores would all be equal.",
        claims=[
            Claim(f"PP-FCIL over {rival} at equal memory", FULL, rival, "final accuracy")
            for rival in (ICARL_DIGITS, GLFC, FEDCBDR, TARGET)
        ],
        seeds=TEN_SEEDS,
    ),
    "pp_fcil_tasks_digits": _task_sweep(
        "PP-FCIL on digits by number of tasks, 5 sites, Dirichlet 0.5",
        DIGITS,
        (2, 5, 10),
    ),
    "pp_fcil_tasks_fashion_mnist": _task_sweep(
        "PP-FCIL on 1,000 images of Fashion-MNIST (14 x 14) by number of tasks, 5 sites, Dirichlet 0.5",
        FASHION,
        (2, 5, 10),
        "data.image_size=14",
        "data.samples_limit=1000",
        network=GROUPED,
    ),
    "pp_fcil_tasks_cifar100": _task_sweep(
        "PP-FCIL on 20 classes of CIFAR-100 (2,000 images of 16 x 16) by number of tasks, 5 sites",
        FASHION,
        (5, 10, 20),
        "data.path=../../../shared/data/cifar100.webp.zip",
        f"data.classes=[{', '.join(TWENTY)}]",
        "data.image_size=16",
        "data.samples_limit=2000",
        # a task of one class has a hundred samples for five sites
        "data.partition.min_samples=2",
        network=GROUPED,
    ),
    "pp_fcil_digits": Table(
        "PP-FCIL on digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5: its parts and its weights",
        [
            _row(FULL, DIGITS),
            _row("without distillation", DIGITS, "learner.distillation=null"),
            _row("without contrastive term", DIGITS, "learner.contrastive=null"),
            _row("without balanced softmax", DIGITS, "learner.classification=ce"),
            _row("without dual backbone", DIGITS, ONE_BACKBONE_ALONE),
            *(_row(label, DIGITS, *changes) for label, changes in _controls()),
            _row(FINE_TUNING, DIGITS, *NO_INCREMENTAL_PARTS),
            _row("weights: size alone, as FedAvg", DIGITS, SIZE_ALONE),
            _row("weights: without recency", DIGITS, "strategy.beta=0"),
            _row("weights: without held-out accuracy", DIGITS, "strategy.gamma=0"),
            _row("weights: without inverse loss", DIGITS, "strategy.delta=0"),
        ],
        note="Every row is the first one but for what its name says.",
        claims=[
            Claim("full system over plain replay", FULL, PLAIN_REPLAY, "final accuracy"),
            Claim(f"full system over {BALANCED_REPLAY}", FULL, BALANCED_REPLAY, "final accuracy"),
            *(
                Claim(f"higher final accuracy by {part} (paper, table 4)", FULL, row, "final accuracy")
                for row, part in TABLE_4.items()
            ),
            Claim("higher by balanced softmax", FULL, "without balanced softmax", "final accuracy"),
            *(
                Claim(f"higher by {factor} (equation 7)", FULL, row, "final accuracy")
                for row, factor in (
                    ("weights: without recency", "recency's share, nobody late"),
                    ("weights: without held-out accuracy", "held-out accuracy"),
                    ("weights: without inverse loss", "inverse loss"),
                )
            ),
        ],
        seeds=TEN_SEEDS,
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
        [
            _row("without protection", DIGITS, SIZE_ALONE),
            _private(0.01),
            _private(0.1),
            _private(1.0),
        ],
        measures={"epsilon": epsilon, **STANDARD},
        plain=frozenset({"epsilon"}),
        note="Epsilon at delta 1e-5, Renyi accountant, 30 rounds, clip norm 1; half the noise multiplier "
        "counts, because replacing a site moves its clipped update by up to twice the clip norm. Weights by "
        "size alone in every row: what sites tell of themselves is not covered by epsilon.",
    ),
    "pp_fcil_fashion_mnist": Table(
        "PP-FCIL on 2,000 samples of Fashion-MNIST, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5",
        [
            _row(FULL, FASHION),
            _row("without distillation", FASHION, "learner.distillation=null"),
            *(_row(label, FASHION, *changes) for label, changes in _controls(GROUPED)),
            _row(FINE_TUNING, FASHION, *PLAIN_LEARNER, GROUPED, "learner.memory=null"),
        ],
        note="Group normalisation in every row.",
        claims=[
            Claim("full system over plain replay", FULL, PLAIN_REPLAY, "final accuracy"),
            Claim(f"full system over {BALANCED_REPLAY}", FULL, BALANCED_REPLAY, "final accuracy"),
            Claim(
                "higher final accuracy by distillation (paper, table 4)",
                FULL,
                "without distillation",
                "final accuracy",
            ),
        ],
        seeds=TEN_SEEDS,
    ),
    "pp_fcil_ham10000": Table(
        "HAM10000, four clinics as they are, tasks of 3, 2 and 2 classes, 20 exemplars of a class at each",
        [
            Row(HAM, "pp_fcil_ham10000", (AT_SITES, REDUCED)),
            Row(ICARL, "icarl_fedavg_ham10000", (AT_SITES, REDUCED)),
            Row(ICARL_EQUALLY, "icarl_fedavg_ham10000", (AT_SITES, REDUCED, "learner.memory.balanced=true")),
            Row(
                "PP-FCIL, every sample drawn once",
                "pp_fcil_ham10000",
                (AT_SITES, REDUCED, "learner.memory.balanced=false"),
            ),
            Row(
                "the same, classifying with its head",
                "pp_fcil_ham10000",
                (AT_SITES, REDUCED, "learner.memory.balanced=false", "learner.classifier=head"),
            ),
        ],
        measures=BALANCED,
        note="2,000 of the 7,994 training samples, class by class in proportion. Measured at the clinics on "
        "what each held out, where both can classify by the nearest mean of the clinic's own exemplars. "
        "PP-FCIL's drawing and weights and both methods' learning rate were chosen on seeds 11 to 13; the "
        "nearest mean was tried on the seeds of this table first.",
        claims=[
            Claim(f"PP-FCIL over {rival} at equal memory", HAM, rival, AVERAGE_BALANCED)
            for rival in (ICARL, ICARL_EQUALLY)
        ]
        + [
            Claim(
                "the same without equal drawing",
                "PP-FCIL, every sample drawn once",
                ICARL,
                AVERAGE_BALANCED,
            )
        ],
        seeds=TEN_SEEDS,
    ),
    **tables_of_paper("pp_fcil"),
}
