"""perennial run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

# everything that a run needs comes in with this module, which the command imports in one go
import perennial.client.handlers
import perennial.server.app  # noqa: F401
from perennial.cli.live import LiveDisplay
from perennial.config.run import RunSettings
from perennial.engine.cohorts import MOST
from perennial.engine.run import load_resumed_settings, run_in_process
from perennial.foundation.errors import ConfigError


def run_command(
    experiment: Path | None,
    overrides: list[str],
    seed: int | None,
    name: str,
    runs: Path,
    workers: int,
    device: str,
    resume: Path | None,
    cohort: str | None,
    gpu: str = "",
) -> None:
    """Run or resume an experiment, with a live display, and print where the results are."""
    asked = None if cohort is None else _parse_cohort(cohort)
    if resume is not None:
        settings = load_resumed_settings(experiment, overrides, seed, resume, device)
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
    settings = replace(settings, gpu=gpu)
    loaded = settings.load()
    folder = settings.folder(loaded)
    changed: list[str] = []
    display = LiveDisplay(loaded)
    display.show_start(folder)
    try:
        with display:
            summary = run_in_process(settings, workers, display.show_event, asked, changed.append)
    except KeyboardInterrupt:
        print(f"perennial: stopped; go on with: perennial run --resume {folder}", file=sys.stderr)
        raise
    display.show_result(summary, folder)
    for sentence in changed:
        print(sentence)


def _parse_cohort(word: str) -> int | Literal["auto"]:
    if word == "auto":
        return "auto"
    if not (word.isascii() and word.isdigit() and 1 <= int(word) <= MOST):
        raise ConfigError(f"--cohort: found {word!r}, allowed auto, or 1 to {MOST} sites in one pass")
    return int(word)
