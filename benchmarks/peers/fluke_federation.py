"""The workload in fluke (Polato 2024, arXiv 2412.15728), in its environment.

Its FedAvg server and clients, weighed by samples; clients forget their optimiser after each round, as FedAvg
says. Evaluation by the library is off.
"""
# torchvision comes first, by the way that also works beside a CPU-only torch
# ruff: noqa: E402
# pyright: reportMissingImports=false

import sys
import time
from pathlib import Path

from perennial.foundation.torchvision_import import torchvision

torchvision()

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from torch import nn

from benchmarks.peers.task import CountedSGD, accuracy, network, read_task, report


def main(folder: Path) -> None:
    task = read_task(folder)
    environment = FlukeENV()
    environment.set_seed(task.seed)
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer = OptimizerConfigurator(
        DDict(name=CountedSGD, lr=task.lr, momentum=task.momentum), DDict(name="StepLR", step_size=1, gamma=1)
    )
    clients = [
        Client(
            place,
            FastDataLoader(
                *samples, num_labels=10, batch_size=task.batch_size, shuffle=True, skip_singleton=False
            ),
            None,  # pyright: ignore[reportArgumentType]
            optimizer,
            nn.CrossEntropyLoss(),
            local_epochs=task.epochs,
            persistency=False,
        )
        for place, samples in enumerate(task.sites)
    ]
    server = Server(network(task), None, clients, weighted=True)
    federation = CentralizedFL(len(clients), None, DDict(), clients=clients, server=server)
    torch.set_num_threads(1)
    start = time.perf_counter()
    federation.run(task.rounds, task.sites_per_round / len(clients), finalize=False)
    seconds = time.perf_counter() - start
    report(seconds, CountedSGD.steps, accuracy(server.model, task.test), "fluke-fl", "numpy")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
