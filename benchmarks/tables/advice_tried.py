"""The advice for who begins, tried on two sets of data that no table and no choice has used."""

from benchmarks.table import STANDARD, Row, Table

SETS = {"lymphoma": "96 samples, 4,026 genes", "nci9": "60 samples, 9,712 genes"}
CLOSED_FORM, ROUNDS = "closed form", "default learner, 5 rounds a task"
AUTO = "closed form as `perennial init` writes it"
_FORM = (
    "model={name: features, features: [{name: random, width: 1000}]}",
    "strategy={name: analytic, head: gaussian, shrinkage: 0.1}",
)


def _rows(name: str) -> list[Row]:
    data = (
        "data={source: npz, path: ../../../shared/data/tabular_multiclass.npz, "
        f"arrays: {{x: {name}_x, y: {name}_y}}, sites: 3, "
        "partition: {kind: dirichlet, alpha: 0.5, min_samples: 2}}"
    )
    tried = {
        CLOSED_FORM: (*_FORM, "tasks={count: 3, order: seeded, rounds: 1}"),
        AUTO: (
            "model={name: features, features: auto}",
            "strategy={name: analytic, head: auto}",
            "tasks={count: 3, order: seeded, rounds: 1}",
        ),
        ROUNDS: ("model={name: mlp, norm: group}", "tasks={count: 3, order: seeded, rounds: 5}"),
    }
    return [
        Row(f"{name}: {label}", "own_data", (data, *changes, "evaluation.federated=false"))
        for label, changes in tried.items()
    ]


TABLES = {
    "advice_tried": Table(
        "Two sets of gene expression of nine kinds each, 3 sites, 3 tasks of 3 kinds: what to begin with",
        [row for name in SETS for row in _rows(name)],
        seeds=tuple(range(1000, 1005)),
        measures=STANDARD,
        note=f"{'; '.join(f'{name}: {words}' for name, words in SETS.items())}; source in the data's own "
        "papers (Li et al. 2017, ACM CSUR). Nothing was chosen on them: closed form has the features and "
        "shrinkage of `hospital_gains`, and the default learner no key of its own. What `perennial init` "
        "writes (`features: auto` and `head: auto`, which the sites' validation samples settle) was added "
        "when the other rows had been seen.",
    )
}
