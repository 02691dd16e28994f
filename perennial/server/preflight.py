"""The checks of an experiment before anything starts, by one function for `perennial check` and every run.

Also the noise of mode client_central, drawn once on the aggregate, after the last reply and before anything
sees the new model. A round that is repeated after a crash draws fresh noise, and is counted as one more
release (server/releases.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from perennial.client.policy import check_claim
from perennial.config.experiment import Experiment
from perennial.config.simulation import load_simulated_federation
from perennial.data.schedule import Registry, TaskSchedule
from perennial.data.site import SiteData
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError, suggest_nearest
from perennial.learning.losses import build_classification
from perennial.learning.scored import Scores
from perennial.models.factory import build_model
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.incremental import IncrementalModel
from perennial.models.saved import Inputs
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise, add_noise
from perennial.privacy.protection import compute_central_noise_std
from perennial.server.position import GlobalModel
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.factory import build_strategy
from perennial.strategies.round.context import RoundOutcome, RunContext
from perennial.strategies.round.request import TaskStart


@dataclass(frozen=True)
class DataFacts:
    """The facts about the data that the server needs.

    test: central test samples, or None; sites: how many to expect; estimated_constants: whether the inputs'
    mean and std come from the training data.
    """

    registry: Registry
    inputs: Inputs
    test: SiteData | None
    sites: int
    notes: tuple[str, ...]
    estimated_constants: bool = False


@dataclass(frozen=True)
class Checked:
    """An experiment that passed all checks.

    model: before task 1. parameters: number that is trained, with all classes.
    width: features that its head reads; if maps are still to be chosen, at most.
    alternatives: features of each map that is compared alone before.
    """

    strategy: IncrementalStrategy
    facts: DataFacts
    model: GlobalModel
    parameters: int
    width: int
    alternatives: tuple[int, ...] = ()


def run_preflight(experiment: Experiment, device: torch.device) -> Checked:
    """Check all that can be checked before anything starts. Raises a PerennialError on what is wrong."""
    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    if plugins.find_target("loss", experiment.learner.classification.name) is not None:
        # at real sites it is theirs alone; where it is here too, what is wrong with it shows here
        build_classification(experiment.learner)
    facts = read_data_facts(experiment)
    schedule, names = facts.registry.schedule, facts.registry.classes
    if strangers := [name for name in experiment.evaluation.operating_points if name not in names]:
        raise ConfigError(
            f"evaluation.operating_points: {strangers[0]!r} is no "
            f"class{suggest_nearest(strangers[0], names)}; allowed: {', '.join(names[:12])}"
        )
    check_privacy(
        experiment,
        strategy,
        estimated_constants=facts.estimated_constants,
    )
    complete = build_model(
        experiment.model,
        facts.inputs.shape,
        schedule.num_classes(schedule.count),
        experiment.seed,
    )
    if plugins.find_target("model", experiment.model.name) is not None:
        _try_backbone(complete, facts.inputs.shape, experiment.model.name)
    parameters = sum(parameter.numel() for parameter in complete.parameters() if parameter.requires_grad)
    constants = facts.inputs.mean, facts.inputs.std
    model = GlobalModel(experiment, facts.registry, facts.inputs.shape, device, constants)
    measured = facts.test is not None and experiment.evaluation.central
    _try_strategy(experiment, schedule, model, measured=measured)
    if not isinstance(maps := complete.backbone, FixedFeatures):
        return Checked(strategy, facts, model, parameters, complete.feature_width)
    alternatives = tuple(maps.widths[place] for slot in maps.alternatives for place in slot)
    return Checked(strategy, facts, model, parameters, maps.widest, alternatives)


def _try_backbone(model: IncrementalModel, shape: tuple[int, ...], name: str) -> None:
    """Raises ConfigError unless somebody's own network makes its features of two empty samples."""
    where = f"model.name: {name}: forward of inputs of shape (2, {', '.join(map(str, shape))})"
    try:
        with torch.no_grad():
            features = model.eval().backbone(torch.zeros(2, *shape))
    except Exception as error:  # whatever the code of a module does
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    allowed = (2, model.feature_width)
    if not isinstance(features, Tensor) or tuple(features.shape) != allowed:
        found = tuple(features.shape) if isinstance(features, Tensor) else f"{features!r:.80}"
        raise ConfigError(f"{where}: returned {found}, allowed a tensor of shape {allowed}, as `width` says")


def _try_strategy(
    experiment: Experiment, schedule: TaskSchedule, model: GlobalModel, *, measured: bool
) -> None:
    """Attach a strategy and begin task 1 with it as a run would, and throw it away.

    model: as before task 1; its arrays stay as they are. measured: whether the server
    has test samples. Raises ConfigError or PrivacyError with the strategy's own reason.
    """
    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    # noise at the server is prepared, and refused, as a run would
    CentralPrivacy.of(experiment.privacy, strategy)
    nothing = Scores(0, np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0))
    strategy.attach(
        RunContext(
            experiment=experiment,
            schedule=schedule,
            input_shape=model.input_shape,
            device=model.device,
            constants=model.constants,
            load=model.load_arrays,
            measure=(lambda arrays: ([], [])) if measured else None,
            judge=(lambda arrays, samples: nothing) if measured else None,
        )
    )
    classes = schedule.list_classes(1)
    strategy.begin_task(TaskStart(1, classes.stop, classes, model.arrays, ()))


def read_data_facts(experiment: Experiment) -> DataFacts:
    """Read the facts from the data if the server has them, else from what the experiment declares."""
    data = experiment.data
    if data.only_at_sites:
        from perennial.data.deployed import derive_constants, derive_fill, derive_input_shape
        from perennial.server.continuation import plan_registry

        registry = plan_registry(experiment)
        _check_memory(experiment, registry, data.sites or 1)
        stored = "float32" if data.source == "csv" else "uint8"
        inputs = Inputs(
            derive_input_shape(data), stored, *derive_constants(data), data.columns, derive_fill(data)
        )
        return DataFacts(registry, inputs, None, data.sites or 1, ())
    federation = load_simulated_federation(experiment)
    if data.partition.kind == "natural":
        try:
            experiment.require_sites(federation.site_names)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    sites = len(federation.sites)
    for key, least in (("quorum", experiment.rounds.quorum), ("wait_for", experiment.rounds.wait_for or 1)):
        if least > sites:
            raise ConfigError(f"rounds.{key}: found {least}, allowed at most {sites}, the number of sites")
    _check_memory(experiment, federation.registry, len(federation.sites))
    if experiment.pretraining is not None:
        first = federation.schedule.list_classes(1)
        for name, site in federation.sites.items():
            held = site.find_task_indices("train", first.start, first.stop)
            experiment.pretraining.require(name, len(held))
    return DataFacts(
        federation.registry,
        Inputs(
            federation.input_shape,
            federation.stored,
            federation.mean,
            federation.std,
            federation.columns,
            federation.fill,
        ),
        federation.test,
        len(federation.sites),
        federation.notes,
        federation.estimated_constants,
    )


def _check_memory(experiment: Experiment, registry: Registry, sites: int) -> None:
    if experiment.learner.memory is not None:
        experiment.learner.memory.require(len(registry.classes), sites)


def check_privacy(
    experiment: Experiment, strategy: IncrementalStrategy, *, estimated_constants: bool
) -> None:
    """Raise PrivacyError with every reason for which the experiment's privacy claim would be false.

    estimated_constants: whether inputs are normalised by figures of the training data.
    """
    disclosed = strategy.disclosures()
    check_claim(
        experiment,
        sparsity=disclosed.sparsity,
        weights_use_metrics=disclosed.weights_use_metrics,
        clear_uploads=disclosed.clear_uploads,
        normalisation_from_data=estimated_constants,
    )
    if experiment.privacy.mode == "client_central":
        strategy.largest_weight(1)


def open_channels(experiment: Experiment) -> tuple[str, ...]:
    """In words, whatever leaves a site, or shows in the run, without noise although privacy is on."""
    channels = []
    if experiment.evaluation.central:
        channels.append("the samples of the server's own test set, on which it measures the model")
    if experiment.learner.memory is not None and experiment.privacy.mode == "sample":
        channels.append(
            f"a {experiment.privacy.hidden_unit} kept as an exemplar is counted in every later round, "
            "as if it were in all"
        )
    capped = [
        key for key in ("samples_limit", "test_limit") if isinstance(getattr(experiment.data, key), int)
    ]
    if capped and experiment.privacy.mode == "sample":
        channels.append(
            f"how a simulation's data were cut by data.{' and data.'.join(capped)}, a number: its threshold "
            "follows how many records there are; a share moves none, and real sites cut nothing"
        )
    return tuple(channels)


# Above this a norm is not that of a clipped update, whatever the order in which its squares were added.
_TOLERANCE = 1 + 1e-5


class CentralPrivacy:
    """Noise on the aggregate, made by the server in mode client_central."""

    def __init__(self, privacy: PrivacyConfig, strategy: IncrementalStrategy) -> None:
        """Raises PrivacyError when the strategy does not bound the weight of one site."""
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        self._strategy = strategy
        self._clip_norm, self._noise_multiplier = privacy.clip_norm, privacy.noise_multiplier
        strategy.largest_weight(1)

    @classmethod
    def of(cls, privacy: PrivacyConfig, strategy: IncrementalStrategy) -> Self | None:
        """The noise of this run at the server; None in other modes."""
        return cls(privacy, strategy) if privacy.mode == "client_central" else None

    def finish_round(self, outcome: RoundOutcome) -> None:
        """Add noise to the round's new model, which replaces it; a skipped round is left alone."""
        if outcome.arrays is None:
            return
        weight = self._strategy.largest_weight(outcome.asked)
        std = compute_central_noise_std(self._clip_norm, self._noise_multiplier, weight)
        outcome.arrays = copy_with_noise(outcome.arrays, std, Noise())
        outcome.details = outcome.details | {"clip_norm": self._clip_norm}

    @property
    def max_update_norm(self) -> float:
        """The norm above which the gate rejects an update, so that no guarantee rests on what sites say."""
        return self._clip_norm * _TOLERANCE


def copy_with_noise(arrays: Mapping[str, Tensor], std: float, source: Noise) -> dict[str, Tensor]:
    """A copy of the arrays with N(0, std^2) on each value of the floating ones."""
    result = {}
    for name, tensor in arrays.items():
        result[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if tensor.is_floating_point():
            add_noise(result[name].view(-1), std, source)
    return result
