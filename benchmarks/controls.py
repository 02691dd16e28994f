"""What simple things reach on a table's data, so that a reader can tell what a method adds.

`python -m benchmarks.controls TABLE...` measures what is missing (without a name: of every table of
CPU size) and adds it to benchmarks/results/controls.jsonl. A protocol is a row's data, its division, its
network and how long a site trains; tables that share one share its controls.

Shapes: n samples, d values or features, C classes.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.environment import machine, versions
from benchmarks.table import RESULTS, RESULTS_REVISION, Row, Table, table_called, tables
from perennial.config.experiment import Experiment
from perennial.config.schema import ON_DISK
from perennial.data.federation import SimulatedFederation, build
from perennial.data.site import SiteData
from perennial.foundation.streams import stream
from perennial.learning.analytic.solve import Sums, compute_gcv, solve_ridge
from perennial.learning.batches import to_float
from perennial.models.factory import build_model
from perennial.models.feature_maps.pixels import RandomReLU
from perennial.models.incremental import IncrementalModel

FILE = "controls.jsonl"
CHANCE = "the most frequent class, always"
RAW_MEAN = "nearest mean of raw inputs"
UNTRAINED_MEAN = "nearest mean on the untrained network"
UNTRAINED_LINEAR = "linear classifier on the untrained network"
CLOSED_FORM = "closed form on 1,500 random features"
JOINT = "joint training, pooled data"
ALONE = "the best site alone"
SIMPLE = (CHANCE, RAW_MEAN, UNTRAINED_MEAN, UNTRAINED_LINEAR)
"""Those that a method must beat before its figures say anything for it."""
LABELS = (*SIMPLE, CLOSED_FORM, JOINT, ALONE)
RATES = (1.0, 0.3, 0.1)
RANDOM_FEATURES = 1500
SHRINKAGES = [10.0**power for power in range(-6, 3)]
BATCH = 500

ACCURACY, BALANCED, OWN = "accuracy", "balanced accuracy", "own models"
COMPARED: Mapping[str, str] = {
    **dict.fromkeys(("final accuracy", "last 5 rounds", "final, nearest mean", "accuracy, head"), ACCURACY),
    **{f"mean of the last {count} rounds": ACCURACY for count in (3, 5, 9, 10)},
    **dict.fromkeys(("final balanced accuracy", "global model, balanced accuracy"), BALANCED),
    "own models": OWN,
}
"""Measure of a table -> what is measured of controls in the same way."""


def compared(table: Table) -> dict[str, str]:
    """The measures of a table that controls have too, and what they are called there."""
    return {head: COMPARED[head] for head in table.measures if head in COMPARED}


@dataclass(frozen=True)
class Protocol:
    """One row's data, division, network and training, for one seed; the row stands for others like it."""

    row: Row
    experiment: Experiment

    @property
    def key(self) -> str:
        """SHA-256 of what decides the controls, the seed included."""
        said = self.experiment.model_dump(mode="json", exclude_unset=True, exclude=ON_DISK)
        learner = said.get("learner") or {}
        kept = {key: said.get(key) for key in ("data", "tasks", "model")}
        kept["learner"] = {key: learner.get(key) for key in ("optimizer", "epochs", "batch_size")}
        text = json.dumps({**kept, "seed": self.experiment.seed}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def protocols(table: Table, seed: int) -> list[Protocol]:
    """One for each kind of data in a table: its first row that trains a network, or else its first."""
    return [
        next((found for found in same if _trained(found.experiment)), same[0])
        for same in _by_kind(table, seed).values()
    ]


def stands_for(table: Table) -> dict[str, str]:
    """Row -> the row whose controls are measured for its kind of data, both by label."""
    chosen = [protocol.row.label for protocol in protocols(table, table.seeds[0])]
    return {
        protocol.row.label: label
        for label, same in zip(chosen, _by_kind(table, table.seeds[0]).values(), strict=True)
        for protocol in same
    }


def _by_kind(table: Table, seed: int) -> dict[str, list[Protocol]]:
    """The rows of each kind of data; rows that differ in division, tasks or network alone are of one kind."""
    found: dict[str, list[Protocol]] = {}
    for row in table.rows:
        experiment = row.load(seed)
        data = experiment.data.model_dump(mode="json", exclude_unset=True)
        kind = json.dumps({k: v for k, v in data.items() if k not in ("sites", "partition")}, sort_keys=True)
        found.setdefault(kind, []).append(Protocol(row, experiment))
    return found


def _trained(experiment: Experiment) -> bool:
    return experiment.model.name != "features"


class Controls:
    """The controls of one protocol, each a number between 0 and 1 by measure."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.federation: SimulatedFederation = build(experiment.data, experiment.tasks, experiment.seed)
        self.sites = list(self.federation.sites.values())
        self.classes = len(self.federation.classes)

    @cached_property
    def pooled(self) -> tuple[Tensor, Tensor]:
        """((n, ...) inputs, labels) of every site's training samples."""
        x, y = zip(*(self._samples(site, site.train) for site in self.sites), strict=True)
        return torch.cat(x), torch.cat(y)

    @cached_property
    def tests(self) -> tuple[Tensor, Tensor]:
        """The server's test set, or else every site's together."""
        held = self.federation.test
        parts = [held] if held is not None else self.sites
        x, y = zip(*(self._samples(part, part.test) for part in parts), strict=True)
        return torch.cat(x), torch.cat(y)

    def all(self) -> dict[str, dict[str, float]]:
        """Control -> measure -> share; controls of a network are left out where no row trains one."""
        x, y = self.pooled
        counts = torch.bincount(y, minlength=self.classes)
        found = {CHANCE: self._measured(lambda inputs: counts.argmax().expand(len(inputs)))}
        found[RAW_MEAN] = self._measured(nearest_mean(x.flatten(1), y, self.classes, lambda z: z.flatten(1)))
        if _trained(self.experiment):
            untrained = self._network()
            features = _in_batches(untrained.features, x)
            found[UNTRAINED_MEAN] = self._measured(
                nearest_mean(features, y, self.classes, untrained.features)
            )
            found[UNTRAINED_LINEAR] = self._measured(linear(features, y, self.classes, untrained.features))
        drawn = RandomReLU(RANDOM_FEATURES, self.federation.input_shape, self.experiment.seed)
        found[CLOSED_FORM] = self._measured(linear(_in_batches(drawn, x), y, self.classes, drawn))
        if _trained(self.experiment):
            found[JOINT] = self._measured(_decisions(self._joint(x, y)))
            found[ALONE] = self._alone()
        return found

    def _joint(self, x: Tensor, y: Tensor) -> IncrementalModel:
        """On all sites' data, at the row's learning rate or a smaller one: the best on validation samples.

        What suits a few steps of each site may be too much for one model that makes all of them.
        """
        parts = [self._samples(site, site.validation) for site in self.sites]
        inputs, labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        models = [self._train(x, y, "pooled", share) for share in (RATES if len(labels) else RATES[:1])]
        hits = [int((_in_batches(_decisions(model), inputs) == labels).sum()) for model in models]
        return models[hits.index(max(hits))]

    def _alone(self) -> dict[str, float]:
        """The best by each measure, on test samples; own models: each site's own on its own, the mean."""
        found, own = [], []
        for site in self.sites:
            x, y = self._samples(site, site.train)
            decide = _decisions(self._train(x, y, site.name))
            found.append(self._measured(decide))
            own += self._at_site(decide, site)
        best = {head: max(each[head] for each in found) for head in (ACCURACY, BALANCED)}
        return best | ({OWN: sum(own) / len(own)} if own else {})

    def _measured(self, decide: Callable[[Tensor], Tensor]) -> dict[str, float]:
        x, y = self.tests
        hits = (_in_batches(decide, x) == y).double()
        recalls = [float(hits[y == label].mean()) for label in y.unique()]
        own = [share for site in self.sites for share in self._at_site(decide, site)]
        shares = {ACCURACY: float(hits.mean()), BALANCED: sum(recalls) / len(recalls)}
        return shares | ({OWN: sum(own) / len(own)} if own else {})

    def _at_site(self, decide: Callable[[Tensor], Tensor], site: SiteData) -> Iterator[float]:
        x, y = self._samples(site, site.test)
        if len(y):
            yield float((_in_batches(decide, x) == y).double().mean())

    def _samples(self, site: SiteData, places: Tensor) -> tuple[Tensor, Tensor]:
        return to_float(site.x[places], self.federation.mean, self.federation.std), site.y[places]

    def _network(self) -> IncrementalModel:
        experiment = self.experiment
        return build_model(
            experiment.model, self.federation.input_shape, self.classes, experiment.seed
        ).eval()

    def _train(self, x: Tensor, y: Tensor, who: str, share: float = 1.0) -> IncrementalModel:
        """The row's network on these samples: its optimiser, batches, and epochs of all its rounds.

        share: of the row's learning rate.
        """
        learner, model = self.experiment.learner, self._network()
        settings = learner.optimizer
        parameters, lr, decay = model.parameters(), share * settings.lr, settings.weight_decay
        optimizer = (
            torch.optim.SGD(parameters, lr, momentum=settings.momentum, weight_decay=decay)
            if settings.name == "sgd"
            else torch.optim.Adam(parameters, lr, weight_decay=decay)
        )
        batches = stream(self.experiment.seed, "controls", who)
        epochs = learner.epochs * sum(self.federation.schedule.rounds)
        model.train()
        for _ in range(epochs):
            for batch in torch.from_numpy(batches.permutation(len(y))).split(learner.batch_size):
                if len(batch) == 1 and len(y) > 1:
                    continue  # batch statistics need two samples
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        return model.eval()


def nearest_mean(
    features: Tensor, y: Tensor, classes: int, map_: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Decide by the nearest class mean, Euclidean. features: (n, d) of training samples."""
    counts = torch.bincount(y, minlength=classes)
    means = torch.zeros(classes, features.shape[1]).index_add_(0, y, features) / counts[:, None].clamp(min=1)
    means[counts == 0] = torch.inf
    return lambda x: torch.cdist(map_(x), means).nan_to_num(torch.inf).argmin(dim=1)


def linear(
    features: Tensor, y: Tensor, classes: int, map_: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Decide by ridge regression on standardised features, its shrinkage by generalised cross-validation."""
    values = torch.cat([features.double(), torch.ones(len(y), 1, dtype=torch.float64)], dim=1)
    sums = torch.zeros(classes, values.shape[1], dtype=torch.float64).index_add_(0, y, values)
    found = Sums(values.T @ values, sums, torch.bincount(y, minlength=classes).double(), 1.0)
    scores = compute_gcv(found, SHRINKAGES, standardise=True)
    head = solve_ridge(found, SHRINKAGES[scores.index(min(scores))], standardise=True)
    return lambda x: head.scores(map_(x)).argmax(dim=1)


def _decisions(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).argmax(dim=1)


@torch.no_grad()
def _in_batches(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in x.split(BATCH)])


@cache
def _read(path: Path, changed: int) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["protocol"]: line for line in lines if line["revision"] == RESULTS_REVISION}


def known(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Protocol -> what was measured of it. changed files are read again."""
    path = results / FILE
    return _read(path, path.stat().st_mtime_ns) if path.exists() else {}


Measured = Mapping[str, Mapping[str, Mapping[int, Mapping[str, float]]]]
"""Label of the row that stands for a kind of data -> control -> seed -> measures."""


def controls_of(table: Table, results: Path = RESULTS) -> Measured:
    """What is measured of a table's controls; {} where none fits its measures."""
    if not compared(table):
        return {}
    measured = known(results)
    found: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for seed in table.seeds:
        for protocol in protocols(table, seed):
            for label, measures in measured.get(protocol.key, {}).get("controls", {}).items():
                found.setdefault(protocol.row.label, {}).setdefault(label, {})[seed] = measures
    return found


def run_controls(table: Table, say: Callable[[str], None] = print, results: Path = RESULTS) -> None:
    """Measure every control of a table that is missing, and keep each protocol as it is done."""
    if not compared(table):
        return
    torch.set_num_threads(1)
    for seed in table.seeds:
        for protocol in protocols(table, seed):
            if protocol.key in known(results):
                continue
            start = time.perf_counter()
            found = Controls(protocol.experiment).all()
            line = {
                "protocol": protocol.key,
                "experiment": protocol.row.experiment,
                "row": protocol.row.label,
                "seed": seed,
                "revision": RESULTS_REVISION,
                "controls": {
                    label: {head: round(share, 6) for head, share in measures.items()}
                    for label, measures in found.items()
                },
                "seconds": round(time.perf_counter() - start, 2),
                "versions": versions(("torch", "numpy")),
                "machine": machine(),
            }
            with (results / FILE).open("a") as file:
                file.write(json.dumps(line) + "\n")
            say(f"controls of {protocol.row.label}, seed {seed}: {line['seconds']} s")


def main(names: Sequence[str]) -> None:
    """Measure what is missing of the named tables, or of all of CPU size."""
    for table in [table_called(name) for name in names] or [
        each for _, each in sorted(tables().items()) if each.scale == "cpu"
    ]:
        run_controls(table)


if __name__ == "__main__":
    main(sys.argv[1:])
