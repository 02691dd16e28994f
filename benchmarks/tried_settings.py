"""The settings that were tried for benchmarks/choices.py, choice by choice; each note says what was taken."""

from benchmarks.table import Row, Table
from benchmarks.tables import cifar100, incre_fl, many_sites, pp_fcil

SEEDS = (11, 12, 13, 14, 15)
CONTRAST = "learner.contrastive={weight: 0.5, temperature: 0.1}"
DISTIL = "learner.distillation={weight: 0.5, temperature: 2.0}"


def _incre_fl(experiment: str, title: str) -> Table:
    """Learners of the base alone: neither attention nor pre-training takes part in the choice."""
    plain = tuple(f"{key}={value}" for key, value in incre_fl.PLAIN.items())
    tried = {
        "as in the experiment": (),
        "contrastive, distillation": (CONTRAST, DISTIL),
    }
    return Table(
        title,
        [Row(label, experiment, (*plain, *changes)) for label, changes in tried.items()],
        seeds=SEEDS[:3],
        measures=incre_fl.MEASURES,
    )


def _many_sites() -> Table:
    """The learning rate by FedAvg, and with it the strength of each method."""
    tried = {
        **{
            f"FedAvg, learning rate {rate:g}": (f"learner.optimizer.lr={rate:g}",)
            for rate in (0.02, 0.05, 0.1)
        },
        **{
            f"FedProx, mu {mu:g}": (f"learner.correction={{name: fedprox, mu: {mu:g}}}",)
            for mu in (0.01, 0.1)
        },
        **{
            f"FedDyn, alpha {alpha:g}": (f"strategy={{name: feddyn, alpha: {alpha:g}}}",)
            for alpha in (0.01, 0.1, 0.3)
        },
        **{
            f"AdaBest, mu {mu:g}, beta {beta:g}": (f"strategy={{name: adabest, mu: {mu:g}, beta: {beta:g}}}",)
            for mu, beta in ((0.02, 0.6), (0.02, 0.8), (0.1, 0.8))
        },
        **{
            f"FedDisco, a {a:g}, b {b:g}": (f"strategy={{name: feddisco, a: {a:g}, b: {b:g}}}",)
            for a, b in ((0.2, 0.1), (0.5, 0.1))
        },
    }
    return Table(
        "Strength of each baseline, 100 sites of Fashion-MNIST, Dirichlet 0.1",
        [Row(label, many_sites.EXPERIMENT, changes) for label, changes in tried.items()],
        seeds=SEEDS[:3],
        measures=many_sites.MEASURES,
        note="Taken: 0.05, FedProx 0.1, FedDyn 0.01. AdaBest and FedDisco were not tried to the end, and "
        "have their papers' strengths.",
    )


def _fedcbdr() -> Table:
    """The optimiser of the rival, whose loss has larger steps where few old samples are in a batch."""
    tried = {
        "learning rate 0.1, momentum 0.9, as PP-FCIL": (),
        "learning rate 0.1, no momentum, as iCaRL and GLFC": ("learner.optimizer={name: sgd, lr: 0.1}",),
        "learning rate 0.02, momentum 0.9": ("learner.optimizer.lr=0.02",),
    }
    return Table(
        "Optimiser of FedCBDR, digits",
        [
            Row(label, pp_fcil.DIGITS, (pp_fcil.CENTRAL, *pp_fcil.CBDR, *changes))
            for label, changes in tried.items()
        ],
        seeds=SEEDS[:2],
    )


def _consolidation() -> Table:
    """Weight and rounds of the term that draws the new backbone towards the fused features."""
    tried = {
        "without": (),
        **{
            f"weight {weight:g}, the last {share:.0%} of a task's rounds": (
                f"learner.consolidation={{weight: {weight:g}, share: {share:g}}}",
            )
            for weight, share in ((1, 0.5), (10, 0.5), (0.1, 0.5), (1, 0.17), (1, 1))
        },
    }
    return Table(
        "Fused features distilled into one backbone, digits",
        [Row(label, pp_fcil.DIGITS, (pp_fcil.CENTRAL, *changes)) for label, changes in tried.items()],
        seeds=SEEDS[:3],
        note="Taken: weight 1 in the last round of a task (17 % of six), by the final accuracy; three seeds "
        "decide nothing.",
    )


def _cifar100_resnet20() -> Table:
    """The learning rate, by plain replay in two short tasks."""
    short = (
        *("data.validation_fraction=0.1", f"data.classes=[{', '.join(pp_fcil.TWENTY[:10])}]"),
        "tasks={count: 2, order: seeded, rounds: 4}",
    )
    return Table(
        "Learning rate of ResNet-20, 10 classes of CIFAR-100 in 2 tasks of 4 rounds",
        [
            Row(
                f"{rate:g}",
                cifar100.EXPERIMENT,
                (cifar100.CENTRAL, cifar100.WHOLE, *cifar100.PLAIN, *short, f"learner.optimizer.lr={rate:g}"),
            )
            for rate in (0.05, 0.1, 0.02)
        ],
        seeds=SEEDS[:1],
        note="Taken: 0.02; less was not tried.",
    )


CHOICES = {
    "cifar100_resnet20": _cifar100_resnet20(),
    "consolidation": _consolidation(),
    "fedcbdr": _fedcbdr(),
    "many_sites": _many_sites(),
    "incre_fl_digits": _incre_fl("incre_fl_digits", "Learner of Incre-FL, digits"),
    "incre_fl_fashion_mnist": _incre_fl("incre_fl_fashion_mnist", "Learner of Incre-FL, Fashion-MNIST"),
    "incre_fl_cifar100_subset": _incre_fl("incre_fl_cifar100_subset", "Learner of Incre-FL, CIFAR-100"),
}
