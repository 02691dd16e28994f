"""One site as this process sees it: its data, its models, its policy and its durable state.

In deployment the node's configuration names a site.yaml; in simulation it holds a partition number, and the site is a
share of the experiment's data. Simulated sites of one process share data and models, one after the other.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context
from torch import Tensor

from client.batches import TrainingSet
from client.exemplars import ExemplarStore
from client.identity import Identity
from client.state import SiteState
from client.workbench import Workbench, choose_device
from config.experiment import Experiment
from config.site import SitePolicy
from data.federation import Federation, SiteData, build, load_site
from data.registry import Registry
from foundation.errors import ProtocolError
from protocol.messages import Stamp
from protocol.tensors import content_sha256


@dataclass
class Process:
    """What the sites of one process share for one experiment: the registry, the constants of inputs, models, tensors."""

    registry: Registry
    mean: Tensor
    std: Tensor
    sites: int
    bench: Workbench
    federation: Federation | None
    placed: dict[int, Tensor]
    models: dict[str, dict[str, Tensor]]

    def on_device(self, tensor: Tensor) -> Tensor:
        """tensor on the workbench's device, moved there once."""
        if self.bench.device.type == "cpu":
            return tensor
        key = id(tensor)
        if key not in self.placed:
            self.placed[key] = tensor.to(self.bench.device)
        return self.placed[key]


_processes: dict[tuple[str, str, str], Process] = {}


@dataclass
class Site:
    """A site ready to answer. folder: where this run's durable records go."""

    name: str
    experiment: Experiment
    policy: SitePolicy
    data: SiteData
    process: Process
    identity: Identity

    @property
    def bench(self) -> Workbench:
        return self.process.bench

    def state(self, run: str) -> SiteState:
        """Durable records of one run."""
        return SiteState(self.identity.state_dir / "runs" / run, self.name, self.identity.shared_models)

    def exemplars(self, run: str) -> ExemplarStore:
        return ExemplarStore(self.state(run), self.data, self.process.registry.classes)

    def samples(self, places: Tensor, exemplars: int = 0) -> TrainingSet:
        """The samples at some places of the site's data, on the device; the last `exemplars` of them are exemplars."""
        process = self.process
        places = places.to(process.bench.device)
        x, y = self.data.gather(process.on_device(self.data.x), process.on_device(self.data.y), places)
        return TrainingSet(x, y, process.mean, process.std, exemplars)

    def check_stamp(self, stamp: Stamp) -> None:
        """Raises ProtocolError when a request is of another experiment or class order."""
        ours = {"experiment": self.experiment.digest, "class_order": self.process.registry.order_hash}
        for name, value in ours.items():
            found = getattr(stamp, name)
            if found != value:
                raise ProtocolError(
                    f"{type(stamp).__name__}: {name}: found {found:.12}, this site has {value:.12}; "
                    "server and site must run the same experiment file and app"
                )

    def previous_model(
        self, run: str, sha256: str, arrays: dict[str, Tensor] | None
    ) -> tuple[str, dict[str, Tensor]] | None:
        """(hash, tensors) of the model of the task before, from the message or from this site's disk; None in task 1.

        Raises ProtocolError when the tensors do not have the promised hash, or the site holds no such model.
        """
        if not sha256:
            return None
        held = self.process.models
        if sha256 not in held:
            tensors = arrays if arrays is not None else self.state(run).get_model(sha256)
            if tensors is None:
                raise ProtocolError(f"previous: this site does not hold model {sha256:.12}; send it along")
            found = content_sha256(tensors)
            if found != sha256:
                raise ProtocolError(f"previous: content {found:.12}, promised {sha256:.12}")
            self.keep_model(run, sha256, tensors)
        return sha256, held[sha256]

    def keep_model(self, run: str, sha256: str, tensors: dict[str, Tensor]) -> None:
        """Keep a model for the next task: on disk, and in this process for the other simulated sites."""
        self.state(run).put_model(sha256, tensors)
        held = self.process.models
        while len(held) >= 2:
            del held[next(iter(held))]
        held[sha256] = {name: tensor.detach().clone() for name, tensor in tensors.items()}


def open_site(context: Context, identity: Identity) -> Site:
    """The site that identity names, with its data read and its models ready (once per process)."""
    experiment = identity.experiment
    torch.set_num_threads(identity.threads)
    device = choose_device(identity.device)
    key = (experiment.digest, str(device), identity.name if identity.own_data else "")
    process = _processes.get(key)
    if process is None:
        # one experiment at a time: a resumed run with more classes must not find the data of the shorter list
        _processes.clear()
        process = _processes[key] = _open_process(identity, device)
    if process.federation is None:
        data = _own_site[identity.name]
    else:
        data = process.federation.site(identity.name)
    return Site(identity.name, experiment, identity.policy, data, process, identity)


_own_site: dict[str, SiteData] = {}


def _open_process(identity: Identity, device: torch.device) -> Process:
    experiment = identity.experiment
    if identity.own_data is None:
        federation = build(experiment.data, experiment.tasks, experiment.seed)
        registry, mean, std, shape = federation.registry, federation.mean, federation.std, federation.input_shape
        sites = len(federation.site_names)
    else:
        federation = None
        local = load_site(identity.own_data, experiment.data, experiment.tasks, experiment.seed, identity.name)
        _own_site[identity.name] = local.data
        registry, mean, std, shape = local.registry, local.mean, local.std, local.input_shape
        sites = experiment.data.sites
    bench = Workbench(experiment, shape, device)
    return Process(registry, mean.to(device), std.to(device), sites, bench, federation, {}, {})
