"""The workload in pfl-research (Granqvist et al. 2024, arXiv 2404.06430), in its environment.

As its own benchmarks do it: FederatedAveraging over a SimulatedBackend in one process, a central optimiser of
step 1, users weighed by samples; `minimize_reuse` takes all sites in turn.
"""
# pyright: reportMissingImports=false

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.task import CountedSGD, Samples, accuracy, network, read_task, report


class Network(nn.Module):
    """The network with the loss and metrics that pfl asks a model for."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor, *, is_eval: bool = False) -> Tensor:
        self.train(not is_eval)
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, **_: Any) -> dict[str, Any]:
        return {}


def main(folder: Path) -> None:
    task = read_task(folder)
    np.random.seed(task.seed)  # noqa: NPY002 - pfl draws from the global generator
    generator = torch.Generator().manual_seed(task.seed)

    def site(place: int) -> Dataset:
        samples: Samples = task.sites[place]
        rows = torch.randperm(len(samples[1]), generator=generator)
        return Dataset([part[rows] for part in samples], user_id=str(place))

    places = list(range(len(task.sites)))
    sites = FederatedDataset(site, get_user_sampler("minimize_reuse", places))
    module = Network(network(task))
    model = PyTorchModel(
        module,
        lambda parameters, lr: CountedSGD(parameters, lr=lr, momentum=task.momentum),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    backend = SimulatedBackend(training_data=sites, val_data=sites, postprocessors=[WeightByDatapoints()])
    settings = NNAlgorithmParams(
        central_num_iterations=task.rounds,
        evaluation_frequency=task.rounds + 1,
        train_cohort_size=task.sites_per_round,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_num_epochs=task.epochs, local_learning_rate=task.lr, local_batch_size=task.batch_size
    )
    start = time.perf_counter()
    FederatedAveraging().run(settings, backend, model, local, None, send_metrics_to_platform=False)
    seconds = time.perf_counter() - start
    report(seconds, CountedSGD.steps, accuracy(module, task.test), "pfl", "numpy")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
