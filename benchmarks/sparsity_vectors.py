"""Which sparsity vector finds the groups of synth_groups.

`python -m benchmarks.sparsity_vectors` trains the global model of experiments/fedperc_synth.yaml
once for each seed that benchmarks/results/sparsity_vectors.jsonl lacks, takes every kind of vector from it,
and writes the table.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import EXPERIMENTS, RESULTS
from perennial.config.experiment import Experiment, load_experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_federation
from perennial.data.augmentation import to_float
from perennial.engine.run import run_in_process
from perennial.models.incremental import IncrementalModel
from perennial.models.saved import GLOBAL_MODEL, load_saved
from perennial.models.sparsity import Combine, SparsityPlan, zero_shares
from perennial.strategies.clusters.clustering import adjusted_rand, k_means
from perennial.strategies.clusters.site_vectors import VectorSettings

SEEDS = (11, 12, 13, 14, 15)
"""Others than those of the table fedperc_synth, whose best vector was chosen by these."""
ROUNDS, CLUSTERS = 18, 4
EXPERIMENT = EXPERIMENTS / "fedperc_synth.yaml"
VECTORS: dict[str, tuple[int, Combine, int]] = {
    "mean of the first 2 ReLU layers, as published": (2, "average", 16),
    "the second layer alone": (2, "last", 32),
    "mean of the first 3 layers": (3, "average", 16),
    "the third layer alone": (3, "last", 64),
}
"""label -> (layers, combine, channels)."""


def global_model(seed: int, folder: Path) -> tuple[Experiment, Path]:
    """The experiment and its model after the global rounds."""
    changes = [f"tasks.rounds={ROUNDS}", "strategy=fedavg"]
    settings = RunSettings(str(EXPERIMENT), ";".join([*changes, f"seed={seed}"]), runs=str(folder))
    run_in_process(settings)
    experiment = load_experiment(EXPERIMENT, changes, seed)
    return experiment, folder / experiment.name / GLOBAL_MODEL


def agreements(experiment: Experiment, model: Path) -> dict[str, float]:
    """Adjusted Rand index of the clusters that each kind of vector makes, against the source's groups."""
    saved = load_saved(model)
    federation = simulated_federation(experiment)
    inputs = {name: federation.site(name).x for name in federation.site_names}
    trained = {name: federation.site(name).train for name in federation.site_names}
    shares = {
        name: zero_shares(saved.model, [to_float(x[trained[name]], saved.inputs.mean, saved.inputs.std)], 3)
        for name, x in inputs.items()
    }
    truth = {name: int(name.split("-")[1]) for name in inputs}
    found: dict[str, float] = {}
    for label, (layers, combine, channels) in VECTORS.items():
        plan = plan_of(saved.model, saved.inputs.shape, layers, combine, channels, experiment.seed)
        vectors = {
            name: plan.vector(zeros[:layers]).float().double().numpy() for name, zeros in shares.items()
        }
        found[label] = adjusted_rand(k_means(vectors, CLUSTERS, experiment.seed), truth) or 0.0
    return found


def plan_of(
    model: IncrementalModel, shape: tuple[int, ...], layers: int, combine: Combine, channels: int, seed: int
) -> SparsityPlan:
    settings = VectorSettings(channels, layers, combine, None, 0.0)
    return settings.first_plan(settings.whole_plan(model, shape), seed)


def page(runs: dict[int, dict[str, float]]) -> str:
    """Mean and deviation over seeds."""
    text = [
        "# Which sparsity vector finds the groups of synth_groups",
        "",
        f"`python -m benchmarks.sparsity_vectors`, seeds {', '.join(map(str, sorted(runs)))}.",
        f"Adjusted Rand index, times 100, of {CLUSTERS} clusters of 16 sites after {ROUNDS} global rounds.",
        "",
        "| vector | 100 x adjusted Rand index |",
        "| --- | --- |",
    ]
    for label in VECTORS:
        values = [100 * run[label] for run in runs.values()]
        text.append(f"| {label} | {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """Measure every seed that the result file lacks, and write the table."""
    path = RESULTS / "sparsity_vectors.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs: dict[int, dict[str, Any]] = {line["seed"]: line["adjusted_rand"] for line in lines}
    for seed in SEEDS:
        if seed in runs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs[seed] = agreements(*global_model(seed, Path(folder)))
        with path.open("a") as file:
            file.write(json.dumps({"seed": seed, "adjusted_rand": runs[seed]}) + "\n")
        print(seed, runs[seed], flush=True)
    (RESULTS / "sparsity_vectors.md").write_text(page(runs))


if __name__ == "__main__":
    main()
