"""What protection costs in time: `privacy_cost site`, `long` or `sample`; prints JSON.

site: the sites' turns of a round of W1 with every update clipped, noised from the secure source and charged
to the site's ledger, over the same turns without protection. A site answers once with and once without before
the next one does: two runs that differ by 2 % cannot be told apart by their own times. long: the same with
W1's data at two sites, whose turns are five times as long.
sample: a round of DP-SGD as the learner runs it, over Opacus used directly on the same model, rate and steps,
in turns in one process. Processor time of one thread, so that other work on the machine counts little.
"""

import json
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer

from benchmarks.workloads import write_workload
from perennial.client.app import HANDLERS
from perennial.client.identity import Identity
from perennial.client.release import as_it_leaves, begin_request
from perennial.client.site import open_site
from perennial.config.experiment import load_experiment
from perennial.config.learner import LearnerConfig, Optimizer
from perennial.config.simulation import list_simulated_sites
from perennial.config.site import SitePolicy
from perennial.data.config import AugmentationConfig, DataConfig
from perennial.data.public_sets import load_digits
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.private_training import train_privately
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, select_travelling
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors

ROUNDS = 40
TOGETHER = 5
"""Sites whose noise is drawn at once, for comparison: W1's cohorts have so many."""
REPEATS, SAMPLES, BATCH, RATE = 9, 1437, 32, 32 / 1437
LEARNER = LearnerConfig(epochs=1, batch_size=BATCH, optimizer=Optimizer(lr=0.05))


class Kind(StrEnum):
    site = "site"
    long = "long"
    sample = "sample"


def main(kind: Kind) -> None:
    """Measure one of them and print it."""
    torch.set_num_threads(1)
    measures: dict[Kind, Callable[[], dict[str, Any]]] = {
        Kind.site: lambda: _site("w1", "w1_private"),
        Kind.long: lambda: _site("w1_two", "w1_private_two"),
        Kind.sample: _sample,
    }
    typer.echo(json.dumps(measures[kind]()))


def _site(unprotected: str, protecting: str) -> dict[str, Any]:
    """What protection costs at a site, relative to none.

    ratios: by the clock, disk and all.
    cpu_ratios: processor time of all threads, the drawing of noise included.
    noise_share, noise_share_in_one_draw: of a turn without protection, by processor time: the drawing of one
    update's noise alone, and as a part of a draw for several sites.
    """
    wall, cpu = [], []
    with tempfile.TemporaryDirectory() as folder:
        plain, private = (_Sites(name, Path(folder)) for name in (unprotected, protecting))
        for number in range(1, ROUNDS + 1):
            spent = {True: [0.0, 0.0], False: [0.0, 0.0]}
            for place in range(len(plain.sites)):
                # alternate the two, so that background load affects both equally
                for protected in (True, False) if (number + place) % 2 else (False, True):
                    start = time.perf_counter(), time.process_time()
                    (private if protected else plain).turn(place, number)
                    spent[protected][0] += time.perf_counter() - start[0]
                    spent[protected][1] += time.process_time() - start[1]
            wall.append(spent[True][0] / spent[False][0])
            cpu.append(spent[True][1] / spent[False][1])
        turn = _least(lambda: plain.turn(0, ROUNDS))
        alone, together = (_least(lambda sites=sites: plain.noise(sites)) / sites for sites in (1, TOGETHER))
    # the first round builds the models and fills caches
    return {
        "ratios": wall[1:],
        "cpu_ratios": cpu[1:],
        "noise_share": alone / turn,
        "noise_share_in_one_draw": together / turn,
    }


def _least(work: Callable[[], object]) -> float:
    """The least processor time of one call in many, in seconds."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


class _Sites:
    """The sites of a workload, asked as the engine asks them."""

    def __init__(self, workload: str, folder: Path) -> None:
        experiment = load_experiment(write_workload(workload, folder))
        policy = SitePolicy(answers=["train"])
        self.sites = [
            Identity(name, experiment, policy, folder / workload / name, "cpu", 1)
            for name in list_simulated_sites(experiment)
        ]
        first = open_site(self.sites[0])
        process = first.process
        classes, shape = process.registry.schedule.num_classes(1), first.data.input_shape
        model = build_model(experiment.model, shape, classes, experiment.seed)
        self._arrays = Tensors(select_travelling(model))
        self._stamp: dict[str, Any] = {
            "run": "c057" * 4,
            "experiment": experiment.digest,
            "class_order": process.registry.order_hash,
            "task": 1,
            "num_classes": classes,
        }

    def noise(self, sites: int) -> None:
        """The noise of so many updates in one draw."""
        values = sum(tensor.numel() for tensor in self._arrays.values())
        Noise().normal((sites * values,), 1.0)

    def turn(self, place: int, number: int) -> None:
        """One site's answer in a round."""
        site, request = self.sites[place], TrainRequest(**self._stamp, round=number, arrays=self._arrays)
        begin_request()
        as_it_leaves(site, request, HANDLERS[TrainRequest](site, request))


def _sample() -> dict[str, Any]:
    source = load_digits(DataConfig(source="digits"))
    data = TrainingSet(source.train.x[:SAMPLES], source.train.y[:SAMPLES], source.mean, source.std)
    _private(data)
    _opacus(data)
    ratios = [_seconds(_private, data) / _seconds(_opacus, data) for _ in range(REPEATS)]
    return {"ratios": ratios, "samples": SAMPLES, "batch": BATCH}


def _model() -> IncrementalModel:
    return build_model(ModelConfig.model_validate({"name": "small_cnn"}), (1, 8, 8), 10, seed=1)


def _seconds(run: Callable[[TrainingSet], None], data: TrainingSet) -> float:
    start = time.process_time()
    run(data)
    return time.process_time() - start


def _private(data: TrainingSet) -> None:
    model = _model()
    privacy = PrivacyConfig(mode="sample", clip_norm=1.0, noise_multiplier=1.0, sample_rate=RATE)
    train_privately(
        LEARNER,
        privacy,
        model,
        FlatParameters(model),
        data,
        Noise(),
        augmentation=AugmentationConfig(),
    )


def _opacus(data: TrainingSet) -> None:
    """The same model, rate and steps by Opacus's own wrappers and noise of PyTorch's generator."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(_model(), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
        loss_reduction="sum",
    )
    generator = stream(1, "poisson")
    model.train()
    for _ in range(round(1 / RATE) + 1):
        rows = torch.from_numpy((generator.random(len(data)) < RATE).nonzero()[0])
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs(rows)), data.y[rows], reduction="sum").backward()
        optimizer.step()


if __name__ == "__main__":
    typer.run(main)
