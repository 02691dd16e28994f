"""Which map, head and shrinkage suit HAM10000: on validation images, of seeds that no table uses.

    python -m benchmarks.analytic_choice --seeds 11 16 '{name: patches, filters: 400, size: 8}' ...

Each argument lists the maps that stand side by side. With fewer samples than features every head of a whole
path of shrinkages follows from one eigendecomposition of the samples' products (n, n), so that one choice
costs seconds and not hours. The heads are those of learning/analytic/solve.py, without the grid that makes
sums exact (tests/benchmarks/test_analytic_choice.py).

Adds to benchmarks/results/analytic_choice.jsonl, one object for each map, seed and head.

Shapes: n samples, d features, v validation samples, C classes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.environment import machine, versions
from benchmarks.table import EXPERIMENTS, RESULTS
from perennial.config.experiment import load_experiment
from perennial.data.federation import build
from perennial.data.site import Part
from perennial.foundation.cache import machine_features
from perennial.learning.analytic.solve import Sums, gaussian, ridge
from perennial.learning.batches import TrainingSet
from perennial.learning.feature_bank import bank_of
from perennial.models.feature_maps.ball import CONSTANT
from perennial.models.feature_maps.fixed import build_fixed_features

LAMBDAS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0, 10.0)
GAMMAS = (0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
LEAST_DEVIATION = 1e-6
HEADS = ("balanced_ridge", "gaussian")


def ridge_scores(
    x: Tensor, y: Tensor, wanted: Tensor, classes: int, *, balanced: bool, shrinkages: Sequence[float]
) -> dict[float, Tensor]:
    """Shrinkage -> (v, C) scores of `wanted` (v, d) by ridge on features of deviation 1.

    x: (n, d) float64.
    y: (n,).
    balanced: every class counts alike.
    """
    counts = torch.bincount(y, minlength=classes).double()
    weight = (1 / counts.clamp(min=1))[y] if balanced else torch.ones(len(y), dtype=torch.float64)
    total = weight.sum()
    mean = (weight[:, None] * x).sum(dim=0) / total
    centred = x - mean
    deviation = ((weight[:, None] * centred.square()).sum(dim=0) / total).sqrt()
    deviation = torch.where(deviation > LEAST_DEVIATION, deviation, torch.inf)
    rows = weight.sqrt()[:, None] * (centred / deviation)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    values = values.clamp(min=0)
    unit = values.sum() / x.shape[1]
    targets = vectors.T @ (weight.sqrt()[:, None] * torch.nn.functional.one_hot(y, classes).double())
    seen = ((wanted - mean) / deviation) @ rows.T @ vectors
    shares = torch.zeros(classes, dtype=torch.float64).index_add_(0, y, weight) / total
    return {s: seen @ (targets / (values + s * unit)[:, None]) + shares for s in shrinkages}


def gaussian_scores(
    x: Tensor, y: Tensor, wanted: Tensor, classes: int, shrinkages: Sequence[float]
) -> dict[float, Tensor]:
    """Shrinkage -> (v, C) scores of `wanted` by linear discriminants, of classes that all have samples."""
    counts = torch.bincount(y, minlength=classes).double()
    means = torch.zeros(classes, x.shape[1], dtype=torch.float64).index_add_(0, y, x) / counts[:, None]
    within = x - means[y]
    deviation = (within.square().sum(dim=0) / (len(y) - classes)).sqrt()
    varies = deviation > LEAST_DEVIATION
    rows = within[:, varies] / deviation[varies] / (len(y) - classes) ** 0.5
    means, wanted = means[:, varies] / deviation[varies], wanted[:, varies] / deviation[varies]
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    turned = rows.T @ vectors
    of_means, of_wanted = means @ turned, wanted @ turned
    found = {}
    for s in shrinkages:
        inner = 1 / (s / (1 - s) + values.clamp(min=0))
        between = (means @ means.T - (of_means * inner) @ of_means.T) / s
        found[s] = (wanted @ means.T - (of_wanted * inner) @ of_means.T) / s - 0.5 * between.diagonal()
    return found


def solved_scores(
    head: str, x: Tensor, y: Tensor, wanted: Tensor, classes: int, shrinkages: Sequence[float]
) -> dict[float, Tensor]:
    """Shrinkage -> (v, C) scores of `wanted` by the product's own solution, for more samples than features.

    head: one of HEADS.
    """
    phi = torch.cat([x, torch.full((len(x), 1), CONSTANT, dtype=torch.float64)], dim=1)
    members = torch.nn.functional.one_hot(y, classes).double()
    balanced = head == "balanced_ridge"
    weight = (1 / members.sum(dim=0).clamp(min=1))[y] if balanced else torch.ones(len(y)).double()
    members *= weight[:, None]
    sums = Sums((phi * weight[:, None]).T @ phi, members.T @ phi, members.sum(dim=0), samples=len(y))
    solved = (gaussian(sums, s) if head == "gaussian" else ridge(sums, s, True) for s in shrinkages)
    return {s: found.scores(wanted) for s, found in zip(shrinkages, solved, strict=True)}


def judged(scores: Mapping[float, Tensor], labels: Tensor, held: Tensor) -> dict[str, tuple[float, float]]:
    """Shrinkage -> (balanced accuracy, accuracy). held: (C,) whether a class has training samples."""
    found = {}
    for shrinkage, rows in scores.items():
        hits = rows.masked_fill(~held, -torch.inf).argmax(dim=1) == labels
        recalls = [float(hits[labels == label].double().mean()) for label in labels.unique()]
        found[str(shrinkage)] = (sum(recalls) / len(recalls), float(hits.double().mean()))
    return found


def features_of(
    model: str, experiment: str, seed: int, changes: Sequence[str]
) -> dict[Part, tuple[Tensor, Tensor]]:
    """Part -> ((n, d) float64 features, labels) of all sites' training and validation samples."""
    changes = [f"model={model}", *changes]
    loaded = load_experiment(EXPERIMENTS / f"{experiment}.yaml", changes, seed)
    federation = build(loaded.data, loaded.tasks, seed)
    constants = federation.mean, federation.std
    config = loaded.model
    maps = build_fixed_features(config.features or (), config.expansion, federation.input_shape, constants)
    sites = list(federation.sites.values())
    found: dict[Part, tuple[Tensor, Tensor]] = {}
    for part in ("train", "validation"):
        rows = torch.cat([site.part(part) for site in sites])
        data = TrainingSet(sites[0].x[rows], sites[0].y[rows], *constants)
        parts = [x for x, _ in bank_of(maps, data, machine_features()).features(maps, data)]
        found[part] = torch.cat(parts).double(), data.y
    return found


def main(
    features: Annotated[list[str], typer.Argument(help="maps, e.g. '{name: patches, filters: 400}'")],
    seeds: Annotated[tuple[int, int], typer.Option(help="first and last")] = (11, 16),
    experiment: Annotated[str, typer.Option(help="whose data and split")] = "analytic_ham10000",
    limit: Annotated[str, typer.Option(help="data.samples_limit; null: all")] = "2000",
    validation: Annotated[float | None, typer.Option(help="data.validation_fraction")] = None,
    heads: Annotated[list[str], typer.Option(help=f"of {', '.join(HEADS)}")] = list(HEADS),  # noqa: B006
    lambdas: Annotated[list[float], typer.Option(help="shrinkages of ridge")] = list(LAMBDAS),  # noqa: B006
    gammas: Annotated[list[float], typer.Option(help="of the Gaussian head")] = list(GAMMAS),  # noqa: B006
    output: Annotated[Path, typer.Option()] = RESULTS / "analytic_choice.jsonl",
) -> None:
    """Measure the heads on each map and seed, and add what was found to the file."""
    changes = [f"data.samples_limit={limit}"]
    if validation is not None:
        changes.append(f"data.validation_fraction={validation}")
    for maps in features:
        model = f"{{name: features, features: [{maps}]}}"
        for seed in range(seeds[0], seeds[1] + 1):
            parts = features_of(model, experiment, seed, changes)
            (x, y), (wanted, labels) = parts["train"], parts["validation"]
            classes = int(max(y.max(), labels.max())) + 1
            held = torch.bincount(y, minlength=classes) > 0
            for head in heads:
                tried = gammas if head == "gaussian" else lambdas
                if x.shape[1] < len(x):
                    scores = solved_scores(head, x, y, wanted, classes, tried)
                elif head == "gaussian":
                    scores = gaussian_scores(x, y, wanted, classes, tried)
                else:
                    scores = ridge_scores(x, y, wanted, classes, balanced=True, shrinkages=tried)
                line = {
                    "features": maps,
                    "experiment": experiment,
                    "samples_limit": limit,
                    "validation_fraction": validation,
                    "seed": seed,
                    "head": head,
                    "training_samples": len(y),
                    "validation_samples": len(labels),
                    "balanced_and_plain_accuracy": judged(scores, labels, held),
                    "versions": versions(("torch", "numpy")),
                    "machine": machine(),
                }
                with output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    typer.run(main)
