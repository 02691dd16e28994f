"""Prepares an experiment's run (data facts, model, strategy, folder, journal), and drives it to its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

import perennial
from perennial.config.experiment import Experiment
from perennial.config.run import CohortPlan, RunSettings
from perennial.foundation.files import DiskWrites
from perennial.foundation.registered import NODES
from perennial.learning.batches import TrainingSet
from perennial.learning.device import choose_device, use_products_of
from perennial.learning.steps import prepare_gpu
from perennial.server.checkpoint import CheckpointWriter
from perennial.server.curriculum import Curriculum
from perennial.server.evaluation import CentralEvaluation
from perennial.server.journal import Journal
from perennial.server.live_status import ParcelGrid
from perennial.server.position import Position
from perennial.server.preflight import preflight
from perennial.server.run_folder import open_run_folder
from perennial.server.summary import write_results


def run_to_the_end(
    grid: Grid,
    experiment: Experiment,
    settings: RunSettings,
    path: Path,
    engine: str,
    listener: Callable[[dict[str, Any]], None] | None,
    cohort: CohortPlan,
) -> dict[str, Any]:
    """Check everything that can be checked before anything starts, then drive the curriculum to its end.

    path: the run's folder. Writes model, summary, metrics and report; returns the summary. engine:
    in-process, ray or grpc. Raises a PerennialError that says what is wrong.
    """
    device = choose_device(settings.device if engine == "in-process" else "cpu")
    prepare_gpu(settings.gpu, device)
    use_products_of(experiment.learner)
    checked = preflight(experiment, device)
    facts, model, strategy = checked.facts, checked.model, checked.strategy
    folder = open_run_folder(
        path, experiment, facts.registry, facts.inputs, bool(settings.resume), cohort.size
    )
    position = folder.checkpoint.progress.journal_position if folder.checkpoint else 0
    journal = Journal(path, position, listener)
    journal.write(
        "resumed" if folder.checkpoint else "run_started",
        experiment=experiment.name,
        version=perennial.__version__,
        seed=experiment.seed,
        engine=engine,
        device=str(device),
        cohort=cohort.size,
        **({"gpu": settings.gpu} if settings.gpu else {}),
    )
    for note in (folder.note, *facts.notes, cohort.note):
        if note:
            journal.note(note)
    test = measured_on = None
    if facts.test is not None and experiment.evaluation.central:
        data = facts.test
        measured_on = data.fingerprint("test", facts.registry.classes)
        test = TrainingSet(
            data.x[data.test].to(device),
            data.y[data.test].to(device),
            data.mean.to(device),
            data.std.to(device),
            channels_last=experiment.learner.channels_last,
            patients=data.keyed.numbered(data.test) if data.patients else None,
        )
    registered = path.parents[2] / NODES if engine == "grpc" else None
    if registered is not None and not registered.exists():
        journal.note(f"{registered}: missing, so sites' names are taken as their nodes say them")
        registered = None
    if engine == "grpc":
        grid = ParcelGrid(grid)
    protected = experiment.privacy.enabled or experiment.secure is not None
    # a request is itself a release: it leaves when what it cost is on the disk, unless nothing leaves
    writes = DiskWrites() if engine == "in-process" and not protected else None
    standing = Position.of(experiment, facts.registry, model, folder)
    curriculum = Curriculum(
        grid,
        standing,
        strategy,
        folder,
        journal,
        CentralEvaluation(standing, test),
        CheckpointWriter(
            folder.checkpoint_folder, experiment.model_dump(mode="json"), standing.progress, journal, writes
        ),
        registered,
        waits_for_sites=engine == "grpc",
    )
    try:
        curriculum.run(facts.sites)
        summary = write_results(curriculum, engine, facts.inputs, measured_on)
        curriculum.finish()
        return summary
    finally:
        journal.close()
