"""perennial run."""

import json
import os
from pathlib import Path

from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file

RESUMED = "experiment.resumed.yaml"


def run_command(
    experiment: Path | None,
    overrides: list[str],
    seed: int | None,
    name: str,
    runs: Path,
    workers: int,
    device: str,
    resume: Path | None,
) -> None:
    """Run or resume, with a live display, and say where the results are."""
    from perennial.cli.live import LiveDisplay
    from perennial.engine.run import run_in_process

    if resume is not None:
        settings = _resumed(experiment, overrides, seed, resume, device)
    elif experiment is None:
        raise ConfigError("perennial run: give an experiment file, or --resume RUN")
    else:
        if seed is not None:
            overrides = [*overrides, f"seed={seed}"]
        settings = RunSettings(
            experiment=str(experiment.resolve()),
            overrides=json.dumps(overrides) if overrides else "",
            name=name,
            runs=str(runs),
            device=device,
        )
    loaded = settings.load()
    folder = settings.folder(loaded)
    with LiveDisplay(loaded) as display:
        try:
            summary = run_in_process(settings, workers, display.on_event)
        except KeyboardInterrupt:
            raise StateError(f"stopped; go on with: perennial run --resume {folder}") from None
    display.show_result(summary, folder)


def _resumed(
    experiment: Path | None, overrides: list[str], seed: int | None, folder: Path, device: str
) -> RunSettings:
    """Settings that go on with folder; a given experiment may add classes and tasks."""
    stored = folder / "experiment.yaml"
    if not os.path.exists(stored):
        raise StateError(f"{folder}: no run to resume here (experiment.yaml is missing)")
    folder = folder.resolve()
    source = folder / "experiment.yaml"
    if experiment is not None or overrides or seed is not None:
        old = load_experiment(source)
        new = load_experiment(experiment or source, overrides, seed)
        if new.tasks != old.tasks or new.data.classes != old.data.classes:
            from perennial.server.continuation import continued

            new = continued(old, new)
        source = folder / RESUMED
        replace_file(source, new.to_yaml().encode(), mode=0o644)
    return RunSettings(
        experiment=str(source), name=folder.name, runs=str(folder.parent), resume="yes", device=device
    )
