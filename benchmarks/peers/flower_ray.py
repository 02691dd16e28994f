"""The workload in Flower's own simulation: a plain ClientApp and ServerApp with FedAvg on Ray, every core."""

import os
import sys
import time
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.task import CountedSGD, Task, accuracy, batches, network, read_task, report

client, server = ClientApp(), ServerApp()
FOLDER = "PEERS_TASK"
"""Environment variable that tells Ray's processes where the task is."""


@lru_cache
def task_of_this_process() -> Task:
    """Read once in each of Ray's processes."""
    return read_task(Path(os.environ[FOLDER]))


@client.train()
def train(message: Message, context: Context) -> Message:
    """One site's round."""
    task = task_of_this_process()
    samples = task.sites[int(context.node_config["partition-id"])]
    model = network(task)
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    model.load_state_dict(arrays.to_torch_state_dict())
    optimizer = CountedSGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    generator = torch.Generator().manual_seed(task.seed)
    before = CountedSGD.steps
    for _ in range(task.epochs):
        for x, y in batches(samples, task.batch_size, generator):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(samples[1]), "steps": CountedSGD.steps - before})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def total_steps(replies: list[RecordDict], weight: str) -> MetricRecord:
    """Steps of one round, of which Flower would take the mean."""
    steps = 0
    for reply in replies:
        metrics = reply["metrics"]
        assert isinstance(metrics, MetricRecord)
        reported = metrics["steps"]
        assert isinstance(reported, int)
        steps += reported
    return MetricRecord({"steps": steps})


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds, and what they came to."""
    task = task_of_this_process()
    model = network(task)
    strategy = FedAvg(
        fraction_train=task.sites_per_round / len(task.sites),
        fraction_evaluate=0.0,
        min_train_nodes=task.sites_per_round,
        min_available_nodes=len(task.sites),
        train_metrics_aggr_fn=total_steps,
    )
    start = time.perf_counter()
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=task.rounds)
    seconds = time.perf_counter() - start
    steps = 0
    for metrics in result.train_metrics_clientapp.values():
        reported = metrics["steps"]
        assert isinstance(reported, int)
        steps += reported
    model.load_state_dict(result.arrays.to_torch_state_dict())
    report(seconds, steps, accuracy(model, task.test), "flwr", "ray", "numpy")


def simulate(folder: str) -> None:
    """Run it and print what it took."""
    os.environ[FOLDER] = folder
    run_simulation(
        server,
        client,
        num_supernodes=len(task_of_this_process().sites),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # Ray's processes find the ClientApp by the name of its module, and `__main__` is another one there
    import_module("benchmarks.peers.flower_ray").simulate(sys.argv[1])
