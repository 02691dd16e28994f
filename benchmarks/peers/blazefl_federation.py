"""The workload in BlazeFL, in its environment: client after client, or in threads.

Its FedAvg server, with its own trainer that takes clients one after the other, or with its pool of two
threads. Neither has momentum, so both get an optimiser that has it, new at each client. Threads run at the
same time on Python 3.14 without its lock; this is the newest release that runs on 3.11, where they share it.
"""
# pyright: reportMissingImports=false

import sys
import time
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgThreadPoolClientTrainer,
    FedAvgUplinkPackage,
)
from blazefl.core import deserialize_model, serialize_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.task import CountedSGD, Task, accuracy, network, read_task, report

THREADS = 2


class Clients:
    """What BlazeFL asks for loaders and for models."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._sets = [TensorDataset(*samples) for samples in task.sites]

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: Any) -> DataLoader[Any]:
        return DataLoader(self._sets[cid], batch_size=batch_size, shuffle=True, generator=generator)

    def select_model(self, name: str) -> nn.Sequential:
        return network(self._task)


class Serial(FedAvgBaseClientTrainer):
    """With momentum that starts anew at each client."""

    momentum = 0.0

    def train(self, model_parameters: Tensor, train_loader: DataLoader[Any], cid: int) -> Any:
        self.optimizer = CountedSGD(self.model.parameters(), lr=self.lr, momentum=self.momentum)
        return super().train(model_parameters, train_loader, cid)


class Threads(FedAvgThreadPoolClientTrainer):
    """Its loop of a client, with momentum; a client tells its steps, because threads share no counter."""

    momentum = 0.0

    def train(
        self, model: nn.Module, model_parameters: Tensor, train_loader: DataLoader[Any], **others: Any
    ) -> FedAvgUplinkPackage:
        deserialize_model(model, model_parameters)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=others["lr"], momentum=self.momentum)
        criterion = nn.CrossEntropyLoss()
        samples = steps = 0
        for _ in range(others["epochs"]):
            for data, target in train_loader:
                loss = criterion(model(data), target)
                samples, steps = samples + len(target), steps + 1
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return FedAvgUplinkPackage(others["cid"], serialize_model(model), samples, {"steps": steps})


def main(folder: Path, mode: str) -> None:
    task = read_task(folder)
    clients, count = Clients(task), len(task.sites)
    share = task.sites_per_round / count
    handler = FedAvgBaseServerHandler(
        clients, "network", clients, task.rounds, count, share, "cpu", task.batch_size, task.seed
    )
    settings = (clients, "network", clients, "cpu", count, task.epochs, task.batch_size, task.lr, task.seed)
    trainer = Threads(*settings, num_parallels=THREADS) if mode == "threads" else Serial(*settings)
    trainer.momentum = task.momentum
    told = 0
    start = time.perf_counter()
    while not handler.if_stop():
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            told += int((package.metadata or {}).get("steps", 0))
            handler.load(package)
    seconds = time.perf_counter() - start
    report(seconds, told or CountedSGD.steps, accuracy(handler.model, task.test), "blazefl", "numpy")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
