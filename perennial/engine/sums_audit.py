"""The part of `perennial audit` for noise on sums of features (release: sums), alone or shared under masks.

A canary is a training sample of a class of its own, at the first site. Its features have the greatest length
that there is, so that it moves its class's sum by that and its count by 1. Whoever guesses weighs both by
their noise, and sees what the server sees: the first site's noised sums, or under `secure` the opened sum
alone. Two runs without noise tell what the canary's features are.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.secure_words import integers_of
from perennial.engine.run import run_in_process
from perennial.engine.white_box import ledger_entries, recording_of
from perennial.foundation.errors import StateError
from perennial.learning.analytic.files import read_statistics_file
from perennial.models.feature_maps.ball import GRID, RADIUS_SQUARED
from perennial.privacy.attacks.white_box import Recording
from perennial.privacy.noised_sums import STEPS
from perennial.privacy.witness import watching
from perennial.server.checkpoint import CHECKPOINT
from perennial.strategies.secure.store import SumStore
from perennial.strategies.statistics.kept import FOLDER, file_name
from perennial.strategies.statistics.noised import sums_form

WIDTH = 32
"""Features without the constant; the claim hardly depends on their number."""
SCALE = 20.0
CLEAR: dict[str, Any] = {"privacy": {"mode": "none"}, "secure": None}


@dataclass(frozen=True)
class SumsSeen:
    """What one audited run shows of its canaries.

    summary: of summary.json. scores: (m,) evidence that each canary is present. trains: (m,) bool, canaries
    that are training samples. recording: the noised run, for white-box tests.
    """

    summary: dict[str, Any]
    scores: np.ndarray
    trains: np.ndarray
    recording: Recording


def sums_seen(experiment: Experiment, folder: Path, present: np.ndarray) -> SumsSeen:
    """Run an experiment with noise on sums three times, twice without noise, and score its canaries.

    folder: for the runs. present: (m,) bool, which canaries are in the data.
    """
    runs = _Runs(experiment, folder, len(present))
    _, with_all, more = runs.run("all", np.ones_like(present), CLEAR)
    _, without, fewer = runs.run("none", np.zeros_like(present), CLEAR)
    features, trains = with_all - without, more - fewer == 1
    summary, sums, counts = runs.run("audited", present, {})
    _, of_sums, of_counts = experiment.privacy.blocks
    moved = ((sums - without) * features).sum(axis=1) / RADIUS_SQUARED
    assert runs.recording is not None
    scores = of_sums**2 * moved + of_counts**2 * (counts - fewer)
    return SumsSeen(summary, scores, trains, runs.recording)


class _Runs:
    def __init__(self, experiment: Experiment, folder: Path, canaries: int) -> None:
        self._experiment, self._folder, self._canaries = experiment, folder, canaries
        self.recording: Recording | None = None
        secure = experiment.secure
        self._sites = experiment.data.sites or (secure.quorum if secure and secure.quorum else 2)

    def run(
        self, name: str, present: np.ndarray, changes: dict[str, Any]
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """(summary, (m, D) sums of each class in units of 1, (m,) counts) of what the server sees."""
        self._write(present)
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self._settings(name) | changes))
        settings = RunSettings(str(path), name=name, runs=str(self._folder / "runs"), device="cpu")
        with watching() as seen:
            summary: Any = run_in_process(settings)
        experiment = settings.load()
        run = settings.folder(experiment)
        if experiment.privacy.enabled:
            self.recording = recording_of(experiment, seen, ledger_entries(run), self._sites)
        sums, counts = self._opened(run) if experiment.secure else self._of_sites(run)
        steps = STEPS if experiment.privacy.enabled else 1
        return summary, sums[:, :WIDTH].double().numpy() / GRID, counts.double().numpy() / steps

    def _of_sites(self, run: Path) -> tuple[Tensor, Tensor]:
        """Of the first site, or of all whose sum a server would see under `secure`."""
        last = self._sites if self._experiment.secure else 1
        found = [read_statistics_file(run / FOLDER / file_name(1, f"{site:05d}"))[0] for site in range(last)]
        return sum(each.sums for each in found), sum(each.counts for each in found)  # pyright: ignore[reportReturnType]

    def _opened(self, run: Path) -> tuple[Tensor, Tensor]:
        shapes = sums_form(WIDTH, self._experiment.privacy).shapes(self._canaries).values()
        for path in sorted((run / CHECKPOINT / "secure").glob("opened-*.json")):
            facts = json.loads(path.read_bytes())
            if facts["statistic"] == "statistics":
                opened = SumStore(run / CHECKPOINT).all_opened("statistics", facts["model"])
                return tuple(integers_of(opened[0].words, *shapes)[1:])  # pyright: ignore[reportReturnType]
        raise StateError(f"{run}: no sum of features was opened")

    def _write(self, present: np.ndarray) -> None:
        """One more record of each class than its canary: the classes are there, whatever the coins say."""
        slot = np.concatenate([np.arange(self._canaries), np.flatnonzero(present)])
        site = np.concatenate([np.arange(self._canaries) % self._sites, np.zeros(present.sum(), dtype=int)])
        x = np.zeros((len(slot), self._canaries + 1), dtype=np.float32)
        x[np.arange(len(slot)), slot] = SCALE
        # each record's content is its own, and the same in all runs
        x[:, -1] = 1e-3 * (slot + np.where(np.arange(len(slot)) < self._canaries, 0, self._canaries))
        names = np.array([f"{label:05d}" for label in slot])
        np.savez(self._folder / "sums.npz", x=x, y=names, site=np.array([f"{each:05d}" for each in site]))

    def _settings(self, name: str) -> dict[str, Any]:
        content = self._experiment.model_dump(mode="json", exclude_unset=True)
        content |= {
            "name": name,
            "data": {
                "source": "npz",
                "path": str(self._folder / "sums.npz"),
                "normalise": {"mean": 0.0, "std": 1.0},
                "partition": {"kind": "natural"},
                "test_fraction": self._experiment.data.test_fraction,
                "validation_fraction": 0,
            },
            "tasks": {"count": 1, "rounds": 1, "order": "natural"},
            "model": {"name": "features", "features": [{"name": "random", "width": WIDTH}]},
            "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 1.0, "standardise": False},
            "evaluation": {"federated": False},
            "rounds": {},
        }
        for key in ("absence", "adversaries"):
            content.pop(key, None)
        return content
