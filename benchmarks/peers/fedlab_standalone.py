"""The workload in FedLab's standalone mode (Zeng et al. 2021, arXiv 2107.11621), in its environment.

Its serial trainer and synchronous server, which weighs sites alike (they differ by one sample at most). The
trainer's own optimiser has no momentum and outlives the round, so training gets a new one each time.
"""
# torchvision comes first, by the way that also works beside a CPU-only torch
# ruff: noqa: E402
# pyright: reportMissingImports=false

import sys
import time
from pathlib import Path
from typing import Any

from perennial.foundation.torchvision_import import torchvision

torchvision()

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.functional import setup_seed
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.task import CountedSGD, Task, accuracy, network, read_task, report


class Sites:
    """The data set that FedLab's trainer asks for loaders."""

    def __init__(self, task: Task) -> None:
        self.sites = [TensorDataset(*samples) for samples in task.sites]

    def get_dataloader(self, place: int, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.sites[place], batch_size=batch_size, shuffle=True)


class Trainer(SGDSerialClientTrainer):
    """With momentum that starts anew at each site."""

    momentum = 0.0

    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader[Any]) -> Any:
        self.optimizer = CountedSGD(self._model.parameters(), lr=self.lr, momentum=self.momentum)
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """Without evaluation after each round."""

    def evaluate(self) -> None:
        return


def main(folder: Path) -> None:
    task = read_task(folder)
    setup_seed(task.seed)
    model = network(task)
    handler = SyncServerHandler(model, task.rounds, task.sites_per_round / len(task.sites))
    trainer = Trainer(model, len(task.sites))
    trainer.momentum = task.momentum
    trainer.setup_dataset(Sites(task))
    trainer.setup_optim(task.epochs, task.batch_size, task.lr)
    pipeline = Pipeline(handler, trainer)
    start = time.perf_counter()
    pipeline.main()
    seconds = time.perf_counter() - start
    report(seconds, CountedSGD.steps, accuracy(handler.model, task.test), "fedlab", "numpy")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
