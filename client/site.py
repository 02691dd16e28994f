"""One site as this process sees it: its data, its models, its policy and its durable state.

In deployment the node's configuration names a site.yaml; in simulation it holds a partition number, and the site is a
share of the experiment's data. Simulated sites of one process share the data and the workbench.
"""

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from flwr.app import Context
from torch import Tensor

from client.batches import TrainingSet
from client.exemplars import ExemplarStore
from client.state import SiteState
from client.workbench import Workbench, choose_device
from config.experiment import Experiment
from config.run import RunSettings, app_experiment
from config.site import SiteConfig, SitePolicy, load_site_config
from data.federation import Federation, SiteData, build, load_site
from foundation.errors import ConfigError, ProtocolError
from protocol.messages import Stamp
from protocol.tensors import content_sha256


@dataclass(frozen=True)
class Registry:
    """What every site must agree on: the class names in order, and how inputs become floats."""

    classes: tuple[str, ...]
    order_hash: str
    mean: Tensor
    std: Tensor


@dataclass
class Site:
    """A site ready to answer. state_dir: where durable things go; models: folder of earlier tasks' models."""

    name: str
    experiment: Experiment
    policy: SitePolicy
    data: SiteData
    registry: Registry
    bench: Workbench
    state_dir: Path
    models: Path | None
    deployed: bool

    def state(self, run: str) -> SiteState:
        """Durable records of one run."""
        return SiteState(self.state_dir / "runs" / run, self.name, self.models)

    def exemplars(self, run: str) -> ExemplarStore:
        return ExemplarStore(self.state(run), self.data, self.registry.classes)

    def samples(self, places: Tensor, exemplars: int = 0) -> TrainingSet:
        """The samples at some places of the site's data, on the device."""
        x, y = on_device(self.data.x, self.bench.device), on_device(self.data.y, self.bench.device)
        places = places.to(self.bench.device)
        return TrainingSet(x[places], y[places], self.registry.mean, self.registry.std, exemplars)

    def check_stamp(self, stamp: Stamp) -> None:
        """Raises ProtocolError when a request is of another experiment or class order."""
        for name, ours in (("experiment", self.experiment.digest), ("class_order", self.registry.order_hash)):
            theirs = getattr(stamp, name)
            if theirs != ours:
                raise ProtocolError(
                    f"{type(stamp).__name__}: {name}: found {theirs:.12}, this site has {ours:.12}; "
                    "server and site must run the same experiment file and app"
                )

    def previous_model(
        self, run: str, sha256: str, arrays: dict[str, Tensor] | None
    ) -> tuple[str, dict[str, Tensor]] | None:
        """(hash, tensors) of the model of the task before, from the message or from this site's disk; None in task 1.

        Raises ProtocolError when the message's tensors do not have the promised hash, or the site holds no such model.
        """
        if not sha256:
            return None
        if arrays is not None:
            found = content_sha256(arrays)
            if found != sha256:
                raise ProtocolError(f"previous_arrays: content {found:.12}, promised {sha256:.12}")
            self.state(run).put_model(sha256, arrays)
            return sha256, arrays
        held = _held_model(self.state(run), sha256)
        if held is None:
            raise ProtocolError(f"previous: this site does not hold model {sha256:.12}; send it along")
        return sha256, held


_HELD: dict[tuple[Path, str], dict[str, Tensor]] = {}


def _held_model(state: SiteState, sha256: str) -> dict[str, Tensor] | None:
    """Read once per process: every simulated site asks for the same model in every round of a task."""
    key = (state.models, sha256)
    if key not in _HELD:
        tensors = state.get_model(sha256)
        if tensors is None:
            return None
        _HELD.clear()
        _HELD[key] = tensors
    return _HELD[key]


@lru_cache(maxsize=1)
def simulated_federation(experiment_digest: str, holder: "_Hashed") -> Federation:
    """The whole simulated data, built once per process."""
    experiment = holder.experiment
    return build(experiment.data, experiment.tasks, experiment.seed)


class _Hashed:
    """Lets an experiment be a cache key by its digest alone."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True
