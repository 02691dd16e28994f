"""One site as this process sees it: its data, its models, its policy and its durable state.

Simulated sites of one process share the data and the models, one after the other.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from perennial.client.exemplars import ExemplarStore
from perennial.client.identity import Identity
from perennial.client.policy import protects_records
from perennial.client.state import DECODED, Quota, SiteState, open_kept_features
from perennial.config.experiment import Experiment
from perennial.config.simulation import DataKey, build_data_key, load_simulated_federation
from perennial.data.samples import find_stored_type
from perennial.data.schedule import Registry, build_registry
from perennial.data.site import SiteData
from perennial.data.splits import derive_simulation_key
from perennial.foundation.cache import BoundedFolder, open_machine_features
from perennial.foundation.devices import to_device
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.foundation.files import make_folder
from perennial.learning.batches import TrainingSet
from perennial.learning.device import choose_device, use_precision, use_products_of
from perennial.learning.steps import Steps, prepare_gpu
from perennial.models.factory import build_model
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.feature_maps.pixels import Constants
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel, complete_state, load_complete
from perennial.models.saved import PERSONAL_MODEL, Inputs, save_model
from perennial.protocol.stamp import NeedsPrevious, Stamp
from perennial.protocol.tensors import hash_tensors

# Building a model costs more than a small site's whole round, so each is built once and reloaded from then
# on; simulated sites of one process share them, one after the other.


@dataclass
class SiteModels:
    """One experiment's models on one device."""

    experiment: Experiment
    input_shape: tuple[int, ...]
    device: torch.device
    constants: Constants | None = None
    """Mean and std of the inputs."""
    _model: IncrementalModel | None = None
    _flat: FlatParameters | None = None
    _previous_in_model: str = ""
    _teacher: tuple[str, IncrementalModel] | None = None
    _fixed: FixedFeatures | None = None

    def load(
        self, num_classes: int, arrays: Mapping[str, Tensor], previous: tuple[str, dict[str, Tensor]] | None
    ) -> tuple[IncrementalModel, FlatParameters]:
        """The trainable model holding arrays, and its flat vector.

        previous: hash and complete tensors of the model at the end of the task before, for models that keep a
        frozen part of it. Raises ProtocolError naming the tensor when arrays do not
        fit the experiment's model.
        """
        sha256, tensors = previous or ("", None)
        if self._model is None or self._model.num_classes != num_classes or self._previous_in_model != sha256:
            self._model = self._flat = None
            model = self._build(num_classes)
            model.begin_task(tensors)
            self._model = self._place_model(model)
            self._flat = FlatParameters(self._model, self.experiment.learner.channels_last)
            self._previous_in_model = sha256
        assert self._flat is not None
        try:
            self._flat.load(arrays)
        except StateError as error:
            raise ProtocolError(f"model received does not fit the experiment: {error}") from error
        return self._model, self._flat

    def check_complete(self, tensors: Mapping[str, Tensor], num_classes: int) -> None:
        """Raises ProtocolError naming the tensor unless tensors are a complete model of so many classes."""
        try:
            load_complete(self._build(num_classes), tensors)
        except StateError as error:
            raise ProtocolError(f"previous_arrays: not a model of this experiment: {error}") from error

    def load_teacher(self, previous: tuple[str, dict[str, Tensor]]) -> IncrementalModel:
        """The complete frozen model of the task before, in evaluation mode."""
        sha256, tensors = previous
        if self._teacher is None or self._teacher[0] != sha256:
            self._teacher = None
            model = self._build(len(tensors["head.weight"]))
            load_complete(model, tensors)
            self._teacher = (sha256, self._place_model(model).eval().requires_grad_(False))
        return self._teacher[1]

    def load_fixed_features(self) -> FixedFeatures:
        """The fixed feature maps of the experiment's model. Raises ConfigError when the model has none."""
        if self._fixed is None:
            backbone = self._build(1).backbone
            if not isinstance(backbone, FixedFeatures):
                name = self.experiment.model.name
                raise ConfigError(f"model.name: found {name!r}, allowed 'features' for closed-form heads")
            self._fixed = backbone.to(self.device)
        return self._fixed

    def _build(self, num_classes: int) -> IncrementalModel:
        experiment = self.experiment
        shape, seed = self.input_shape, experiment.seed
        return build_model(experiment.model, shape, num_classes, seed, self.constants)

    def _place_model(self, model: IncrementalModel) -> IncrementalModel:
        return model.to(self.device)


HELD_MODELS = 2


@dataclass
class Process:
    """What the sites of one process share for one experiment.

    data: by site; x, y, mean and std are the same tensors for all of them. earlier_models: at the end of
    earlier tasks, by content hash.
    """

    registry: Registry
    data: dict[str, SiteData]
    sites: int
    models: SiteModels
    earlier_models: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    _placed: dict[str, Tensor] = field(default_factory=dict)

    def place_shared(self, name: Literal["x", "y", "mean", "std"]) -> Tensor:
        """A tensor that the sites of this process share, on the models' device, moved there once."""
        if name not in self._placed:
            shared: Tensor = getattr(next(iter(self.data.values())), name)
            self._placed[name] = shared.to(self.models.device)
        return self._placed[name]


@dataclass
class Site:
    """A site ready to answer."""

    identity: Identity
    process: Process

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def experiment(self) -> Experiment:
        return self.identity.experiment

    @property
    def data(self) -> SiteData:
        return self.process.data[self.name]

    @property
    def models(self) -> SiteModels:
        return self.process.models

    def steps(self) -> Steps:
        """The object that carries out training steps, with the GPU options of this site."""
        return prepare_gpu(self.identity.gpu, self.models.device)

    def measuring(self) -> AbstractContextManager[None]:
        """The precision in which this site measures a model: the one in which it trains."""
        return use_precision(self.experiment.learner, self.models.device)

    def state(self, run: str) -> SiteState:
        """Durable records of one run."""
        runs, limits = self.identity.state_dir / "runs", self.identity.limits
        quota = Quota(runs, limits) if limits is not None else None
        return SiteState(runs / run, self.name, self.identity.shared_models, quota)

    def open_exemplars(self, run: str) -> ExemplarStore:
        return ExemplarStore(self.state(run), self.data, self.process.registry.classes)

    def samples(self, indices: Tensor, exemplars: int = 0, hidden: bool = False) -> TrainingSet:
        """The samples at indices, on the device.

        exemplars: how many of the last are exemplars. hidden: the release hides each, whatever the mode is.
        """
        place = self.process.place_shared
        patients = None
        if self.experiment.privacy.unit == "patient":
            if not self.data.patients:
                raise ConfigError(
                    "data.patient: missing; privacy.unit is patient, so the data must name them"
                )
            patients = self.data.keyed.number_groups(indices.cpu())
        indices = to_device(indices, self.models.device)
        return TrainingSet(
            place("x")[indices],
            place("y")[indices],
            place("mean"),
            place("std"),
            exemplars,
            self.experiment.learner.channels_last,
            patients,
            alone=hidden
            or self.experiment.privacy.hidden_unit in ("sample", "patient")
            or self.identity.policy.unit in ("sample", "patient"),
        )

    @property
    def feature_folder(self) -> BoundedFolder:
        """The folder for features of this site's samples; simulated sites share the machine's cache."""
        limits = self.identity.limits
        return (
            open_machine_features() if limits is None else open_kept_features(self.identity.state_dir, limits)
        )

    def find_task_range(self, stamp: Stamp) -> range:
        """Labels of the classes that the stamp's task brings."""
        return self.process.registry.schedule.list_classes(stamp.task)

    def check_experiment(self, stamp: Stamp) -> None:
        """Raises ProtocolError when a request is of another experiment or class order; writes nothing."""
        require_same_experiment(self.experiment, self.process.registry, stamp)

    def load_previous_model(self, request: NeedsPrevious) -> tuple[str, dict[str, Tensor]] | None:
        """(hash, tensors) of the previous task's model, from the message or from this site's disk.

        None in task 1. What a message brings is written to the disk only once it is known to be a model of
        this experiment at the end of the previous task. Raises ProtocolError when it is not, when it does not
        have the promised hash, or when the site holds no such model.
        """
        sha256 = request.previous
        if not sha256:
            return None
        if request.task == 1:
            raise ProtocolError(f"previous: found {sha256:.12} in task 1, before which there is no model")
        held = self.process.earlier_models
        if sha256 not in held:
            tensors = request.previous_arrays
            if tensors is not None:
                self.models.check_complete(tensors, self.find_task_range(request).start)
            else:
                tensors = self.state(request.run).get_model(sha256)
            if tensors is None:
                raise ProtocolError(f"previous: this site does not hold model {sha256:.12}; send it along")
            self.keep_model(request.run, sha256, tensors)
        # whoever asks for a model needs none that was kept before it
        for earlier in [*held][: [*held].index(sha256)]:
            del held[earlier]
        return sha256, held[sha256]

    def keep_model(self, run: str, sha256: str, tensors: dict[str, Tensor]) -> None:
        """Keep a model for the next task on disk, and in memory for the process's other simulated sites.

        Raises ProtocolError if its content does not have this hash.
        """
        found = hash_tensors(tensors)
        if found != sha256:
            raise ProtocolError(f"previous: content {found:.12}, promised {sha256:.12}")
        self.state(run).put_model(sha256, tensors)
        held = self.process.earlier_models
        if sha256 in held:
            return
        while len(held) >= HELD_MODELS:
            del held[next(iter(held))]
        held[sha256] = {
            name: tensor.detach().to(self.models.device).clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }

    def keep_own_model(self, model: IncrementalModel, class_means: Tensor | None) -> None:
        """Replace the site's model file. class_means: (M, d), if the site classifies by them."""
        data, folder = self.data, self.identity.state_dir
        make_folder(folder)
        save_model(
            folder / PERSONAL_MODEL,
            complete_state(model),
            Inputs(data.input_shape, find_stored_type(data.x), data.mean, data.std, data.columns, data.fill),
            self.process.registry.classes[: model.num_classes],
            self.experiment.model_dump_json(),
            class_means,
        )


_processes: dict[tuple[DataKey, str, str, str], Process] = {}


def open_site(identity: Identity, stamp: Stamp | None = None, split_key: str = "") -> Site:
    """The site of this identity, with its data read and its models built, both once per process.

    stamp: of the request; its split_key divides the data of a deployed site. split_key: that key where there
    is no request. Without either, data are divided as in a simulation.
    """
    torch.set_num_threads(identity.threads)
    device = choose_device(identity.device)
    use_products_of(identity.experiment.learner)
    own = identity.name if identity.own_data is not None else ""
    split_key = (stamp.split_key if stamp is not None else split_key) if own else ""
    if stamp is not None:
        require_split_key(identity, stamp)
    key = (build_data_key(identity.experiment, identity.own_data), str(device), own, split_key)
    if key not in _processes:
        # one experiment at a time: a continued run must not keep the data of the shorter class list in memory
        _processes.clear()
        _processes[key] = _open_process(identity, device, bytes.fromhex(split_key))
    return Site(identity, _processes[key])


def require_split_key(identity: Identity, stamp: Stamp) -> None:
    """Raises ProtocolError if a site with data of its own gets a request without a split key."""
    if identity.own_data is not None and not stamp.split_key:
        raise ProtocolError(
            f"{type(stamp).__name__}: split_key: missing; a site with data of its own divides them by it"
        )


def build_registry_of_site(identity: Identity) -> Registry:
    """Names and order of the experiment's classes, without reading any data of the site's own.

    Raises ConfigError if a site with data of its own has an experiment without data.classes.
    """
    experiment = identity.experiment
    if identity.own_data is None:
        return load_simulated_federation(experiment).registry
    if experiment.data.classes is None:
        raise ConfigError(
            "data.classes: missing; a site with data of its own needs the registry of class names"
        )
    return build_registry(experiment.data.classes, experiment.tasks, experiment.seed)


def require_same_experiment(experiment: Experiment, registry: Registry, stamp: Stamp) -> None:
    """Raises ProtocolError when a request is of another experiment, class order or task; writes nothing."""
    for name, value in (("experiment", experiment.digest), ("class_order", registry.order_hash)):
        found = getattr(stamp, name)
        if found != value:
            raise ProtocolError(
                f"{type(stamp).__name__}: {name}: found {found:.12}, this site has {value:.12}; "
                "server and site must run the same experiment file and app"
            )
    tasks = registry.schedule.count
    if stamp.task > tasks:
        raise ProtocolError(f"{type(stamp).__name__}: task: found {stamp.task}, allowed 1 to {tasks}")


def _open_process(identity: Identity, device: torch.device, split_key: bytes) -> Process:
    experiment = identity.experiment
    if identity.own_data is None:
        federation = load_simulated_federation(experiment)
        registry, data, shape = federation.registry, federation.sites, federation.input_shape
        sites, constants = len(data), (federation.mean, federation.std)
        if identity.name not in data:
            raise ConfigError(
                f"site {identity.name!r} holds no training sample in this experiment and takes no part"
            )
    else:
        from perennial.data.deployed import load_site, merge_site_config

        registry = build_registry_of_site(identity)
        config = merge_site_config(experiment.data, identity.own_data)
        cache, protected = identity.state_dir / DECODED, protects_records(identity)
        split_key = split_key or derive_simulation_key(experiment.seed)
        own = load_site(config, registry.classes, identity.name, experiment.seed, split_key, cache, protected)
        data, shape, sites = {identity.name: own}, own.input_shape, experiment.data.sites or 1
        constants = own.mean, own.std
    return Process(registry, data, sites, SiteModels(experiment, shape, device, constants))
