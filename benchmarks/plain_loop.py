"""What a person would write without any framework: federated averaging as two loops in one thread.

`python -m benchmarks.plain_loop w1` prints seconds and processor seconds of the rounds, local
steps, accuracy on the test set, and the final model's distance from the engine's own when given its file.
Same model, data, division, batches and sampled sites as the engine; PyTorch's own optimiser; state dicts
averaged by samples. Inputs are made floats before the clock starts, which the engine does in every round.
"""

import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.workloads import write_workload
from perennial.config.experiment import Experiment, load_experiment
from perennial.data.federation import SimulatedFederation, build
from perennial.foundation.streams import stream
from perennial.learning.batches import to_float
from perennial.models.factory import build_model

State = dict[str, Tensor]


def sampled(experiment: Experiment, sites: list[str], number: int) -> list[str]:
    """The sites of one round, drawn as the engine draws them."""
    share = experiment.rounds.fraction
    if share == 1.0:
        return sites
    generator = stream(experiment.seed, "client-sampling", number)
    chosen = generator.choice(len(sites), size=round(share * len(sites)), replace=False)
    return [sites[index] for index in sorted(chosen.tolist())]


def local_steps(
    experiment: Experiment, model: nn.Module, x: Tensor, y: Tensor, site: str, number: int
) -> int:
    """Train model on one site's samples; returns the steps done."""
    learner = experiment.learner
    optimizer = torch.optim.SGD(
        model.parameters(), lr=learner.optimizer.lr, momentum=learner.optimizer.momentum
    )
    generator = stream(experiment.seed, "batches", site, number)
    steps = 0
    for _ in range(learner.epochs):
        for batch in torch.from_numpy(generator.permutation(len(y))).split(learner.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            steps += 1
    return steps


def average(states: list[State], weights: list[int]) -> State:
    """Mean of state dicts, weighted."""
    total = sum(weights)
    return {
        key: torch.stack([state[key] * (n / total) for state, n in zip(states, weights, strict=True)]).sum(0)
        for key in states[0]
    }


def run(experiment: Experiment) -> tuple[float, float, int, State, float]:
    """(seconds and processor seconds of the rounds, local steps, final model, its accuracy)."""
    torch.set_num_threads(1)
    federation = build(experiment.data, experiment.tasks, experiment.seed)
    samples = {
        name: (to_float(data.x[data.train], data.mean, data.std), data.y[data.train])
        for name, data in federation.sites.items()
    }
    model = build_model(
        experiment.model, federation.input_shape, len(federation.classes), experiment.seed
    ).train()
    # the first optimiser of a process imports PyTorch's compiler, which is not the loop's work
    torch.optim.SGD(model.parameters(), lr=0.1)
    global_state = copy.deepcopy(model.state_dict())
    steps = 0
    start, cpu = time.perf_counter(), time.process_time()
    for number in range(1, federation.schedule.rounds[0] + 1):
        states, weights = [], []
        for site in sampled(experiment, list(samples), number):
            x, y = samples[site]
            model.load_state_dict(global_state)
            steps += local_steps(experiment, model, x, y, site, number)
            states.append({key: value.clone() for key, value in model.state_dict().items()})
            weights.append(len(y))
        global_state = average(states, weights)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    model.load_state_dict(global_state)
    return seconds, cpu_seconds, steps, global_state, accuracy(model, federation)


@torch.no_grad()
def accuracy(model: nn.Module, federation: SimulatedFederation) -> float:
    """Share of right answers on the server's test set."""
    assert federation.test is not None
    test = federation.test
    logits = model.eval()(to_float(test.x[test.test], test.mean, test.std))
    return float((logits.argmax(dim=1) == test.y[test.test]).float().mean())


def main(
    workload: str,
    compare: Annotated[str, typer.Option(help="model.safetensors")] = "",
    changes: Annotated[str, typer.Option(help="KEY=VALUE;KEY=VALUE")] = "",
) -> None:
    """Print one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = load_experiment(
            write_workload(workload, Path(folder)), list(filter(None, changes.split(";")))
        )
        seconds, cpu, steps, state, right = run(experiment)
    distance = None
    if compare:
        theirs = load_file(compare)
        distance = max(float((state[key] - theirs[key]).abs().max()) for key in state)
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "steps": steps,
        "accuracy": right,
        "distance": distance,
    }
    typer.echo(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
