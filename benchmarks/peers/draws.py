"""Why simulators end W2 at other accuracies: the same data, division and first values, other draws.

`python -m benchmarks.peers.draws` runs the plain loop on W2 with twenty draws of the sites of a
round and of the order of samples, which each simulator has of its own, and writes results/w2_draws.json.
"""

import json
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.environment import machine, versions
from benchmarks.plain_loop import accuracy, average, local_steps, sampled
from benchmarks.table import RESULTS
from benchmarks.workloads import write_workload
from perennial.config.experiment import load_experiment
from perennial.data.augmentation import to_float
from perennial.data.federation import build
from perennial.models.factory import build_model

RECORD = RESULTS / "w2_draws.json"
SEEDS = tuple(range(1000, 1020))


def main() -> None:
    """Run the draws and keep their accuracies, in per cent."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        experiment = load_experiment(write_workload("w2", Path(folder)))
    federation = build(experiment.data, experiment.tasks, experiment.seed)
    samples = {
        name: (to_float(site.x[site.train], site.mean, site.std), site.y[site.train])
        for name, site in federation.sites.items()
    }
    found = []
    for seed in SEEDS:
        drawn = experiment.model_copy(update={"seed": seed})
        model = build_model(
            experiment.model, federation.input_shape, len(federation.classes), experiment.seed
        ).train()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        for number in range(1, federation.schedule.rounds[0] + 1):
            states, weights = [], []
            for site in sampled(drawn, list(samples), number):
                model.load_state_dict(state)
                local_steps(drawn, model.train(), *samples[site], site, number)
                states.append({key: value.clone() for key, value in model.state_dict().items()})
                weights.append(len(samples[site][1]))
            state = average(states, weights)
        model.load_state_dict(state)
        found.append(round(100 * accuracy(model, federation), 1))
    facts = {"least": min(found), "median": statistics.median(found), "greatest": max(found)}
    line = {"seeds": list(SEEDS), "accuracies": found, **facts, "versions": versions(), "machine": machine()}
    RECORD.write_text(json.dumps(line, indent=1) + "\n")


if __name__ == "__main__":
    main()
