"""From an experiment to a run that is ready to go: data facts, model, strategy, folder and journal."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_federation
from perennial.data.deployed import declared_constants, declared_input_shape
from perennial.data.registry import Registry, build_registry
from perennial.data.site import SiteData
from perennial.foundation.errors import ConfigError
from perennial.foundation.registered import NODES
from perennial.learning.batches import TrainingSet
from perennial.learning.device import choose_device
from perennial.models.saved import Inputs
from perennial.server.curriculum import Curriculum
from perennial.server.dry_run import dry_run
from perennial.server.global_model import GlobalModel
from perennial.server.journal import Journal
from perennial.server.privacy_claim import check_privacy
from perennial.server.run_folder import RunFolder, open_run_folder
from perennial.server.summary import write_results
from perennial.strategies.factory import build_strategy


@dataclass
class ReadyRun:
    """A run with everything opened. engine: in-process, ray or grpc."""

    curriculum: Curriculum
    expected_sites: int
    folder: RunFolder
    engine: str
    inputs: Inputs

    def to_the_end(self) -> dict[str, Any]:
        """Drive the curriculum, then write model, summary, metrics and report; returns the summary."""
        try:
            self.curriculum.run(self.expected_sites)
            return write_results(self.curriculum, self.engine, self.inputs)
        finally:
            self.curriculum.journal.close()


@dataclass(frozen=True)
class DataFacts:
    """What the server needs to know of the data.

    test: central test samples, or None; sites: how many to expect; estimated_constants: whether the inputs'
    mean and std come from the training data.
    """

    registry: Registry
    inputs: Inputs
    test: SiteData | None
    sites: int
    notes: tuple[str, ...]
    estimated_constants: bool = False

    def measuring(self, experiment: Experiment) -> tuple[Tensor, Tensor] | None:
        """(mean, std) of the inputs where the server measures models; None where it does not."""
        if self.test is None or not experiment.evaluation.central:
            return None
        return self.test.mean, self.test.std


def assemble(
    grid: Grid,
    experiment: Experiment,
    settings: RunSettings,
    path: Path,
    engine: str,
    listener: Callable[[dict[str, Any]], None] | None,
) -> ReadyRun:
    """Check everything that can be checked before anything starts. Raises a PerennialError that says what is
    wrong."""
    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    facts = data_facts(experiment)
    check_privacy(
        experiment,
        strategy,
        rounds=experiment.lead_rounds(1) + sum(facts.registry.schedule.rounds),
        estimated_constants=facts.estimated_constants,
    )
    device = choose_device(settings.device if engine == "in-process" else "cpu")
    model = GlobalModel(experiment, facts.registry, facts.inputs.shape, device)
    dry_run(experiment, facts.registry.schedule, model, facts.measuring(experiment))
    folder = open_run_folder(path, experiment, facts.registry, facts.inputs, bool(settings.resume))
    position = folder.checkpoint.progress.journal_position if folder.checkpoint else 0
    journal = Journal(path, position, listener)
    journal.write(
        "resumed" if folder.checkpoint else "run_started",
        experiment=experiment.name,
        seed=experiment.seed,
        engine=engine,
        device=str(device),
        noise_source=experiment.privacy.noise_source if experiment.privacy.enabled else None,
    )
    for note in (folder.note, *facts.notes):
        if note:
            journal.write("note", text=note)
    test = None
    if facts.test is not None and experiment.evaluation.central:
        data = facts.test
        test = TrainingSet(
            data.x[data.test].to(device),
            data.y[data.test].to(device),
            data.mean.to(device),
            data.std.to(device),
        )
    registered = path.parents[2] / NODES if engine == "grpc" else None
    if registered is not None and not registered.exists():
        journal.write(
            "note", text=f"{registered}: missing, so sites' names are taken as their nodes say them"
        )
        registered = None
    curriculum = Curriculum(
        grid, experiment, facts.registry, model, strategy, folder, journal, test, registered
    )
    return ReadyRun(curriculum, facts.sites, folder, engine, facts.inputs)


def data_facts(experiment: Experiment) -> DataFacts:
    """From the data where the server has it, else from what the experiment declares."""
    data = experiment.data
    if data.only_at_sites:
        if data.classes is None:
            raise ConfigError(
                "data.classes: missing; a server without data needs the registry of class names"
            )
        registry = build_registry(data.classes, experiment.tasks, experiment.seed)
        _check_memory(experiment, registry, data.sites or 1)
        stored = "float32" if data.source == "csv" else "uint8"
        inputs = Inputs(declared_input_shape(data), stored, *declared_constants(data), data.columns)
        return DataFacts(registry, inputs, None, data.sites or 1, ())
    federation = simulated_federation(experiment)
    if data.partition.kind == "natural":
        try:
            experiment.require_sites(federation.site_names)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    _check_memory(experiment, federation.registry, len(federation.sites))
    if experiment.pretraining is not None:
        first = federation.schedule.classes_of(1)
        for name, site in federation.sites.items():
            held = site.task_indices("train", first.start, first.stop)
            experiment.pretraining.require(name, len(held))
    return DataFacts(
        federation.registry,
        Inputs(
            federation.input_shape, federation.stored, federation.mean, federation.std, federation.columns
        ),
        federation.test,
        len(federation.sites),
        federation.notes,
        federation.estimated_constants,
    )


def _check_memory(experiment: Experiment, registry: Registry, sites: int) -> None:
    if experiment.learner.memory is not None:
        experiment.learner.memory.require(len(registry.classes), sites)
