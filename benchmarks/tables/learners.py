"""The demo's learner beside plain replay and fine-tuning."""

from benchmarks.table import Row, Table

TABLES = {
    "learners_digits": Table(
        "Digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.5: what the parts of the learner do",
        [
            Row(
                "quickstart: replay, balanced softmax, distillation, contrastive term",
                "quickstart",
                ("evaluation.every=task",),
            ),
            Row("plain replay", "replay_digits", ("evaluation.every=task",)),
            Row("fine-tuning", "finetune_digits", ("evaluation.every=task",)),
        ],
        seeds=tuple(range(1000, 1010)),
    )
}
