"""Estimates at a site, and keeps there, what its releases cost a typical record.

The figure stands beside the ledger's worst case, never instead of it. It is computed from private data, so no
message carries it: `perennial ledger` shows it at the site, and the report of a simulated run shows it.

The neighbours differ with the mode. sample: one record, drawn like the site's own, is added or removed; it
moves the sum of a batch by its clipped gradient. client_local: the site's data is replaced by another draw
from where it came from; no site may see what another one would send, so two disjoint halves of its own data
stand for two draws, each taken twice, which makes it as many steps.

Triastcyn and Faltings 2019 (arXiv 1901.09697, 1911.10071).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.foundation.errors import PrivacyError, StateError
from perennial.foundation.files import make_folder, replace_file
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet
from perennial.learning.training import TrainingResult
from perennial.models.flat import FlatParameters
from perennial.privacy.bayesian import PAIRS, BayesianAccountant
from perennial.privacy.protection import clip

FILE = "typical.json"
"""The name on disk from earlier versions, so that a run in progress keeps what it has counted."""


@dataclass(frozen=True)
class BayesianFigure:
    """A run's Bayesian figure, as a site keeps it.

    epsilon: None if the bound is void. delta: that it holds for. invocations: of the mechanism, of `planned`.
    void: why the bound is void, or ''.
    """

    epsilon: float | None
    delta: float
    invocations: int
    planned: int
    void: str


@dataclass
class NeighbourDistances:
    """Distances measured in one round, until keep() adds them to the run's file at the site, `path`.

    rounds: of all tasks, which the bound is planned for; one more voids it. pairs: neighbours that are
    sampled at each invocation of the mechanism.
    """

    path: Path
    experiment: Experiment
    rounds: int
    pairs: int
    generator: np.random.Generator
    _seen: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls, experiment: Experiment, rounds: int, state_dir: Path, site: str, run: str, round_number: int
    ) -> Self | None:
        """Begin a round; None if no estimate is asked for, or if only the server could make one."""
        privacy = experiment.privacy
        if not privacy.bayesian or privacy.mode not in ("client_local", "sample"):
            return None
        generator = stream(experiment.seed, "typical-record", site, round_number)
        path = _locate(state_dir, run)
        return cls(path, experiment, rounds, PAIRS, generator)

    def draw_records(self, samples: int) -> Tensor:
        """(pairs,) indices of records of `samples`, drawn at random with replacement."""
        return torch.from_numpy(self.generator.integers(samples, size=self.pairs))

    def see(self, distances: Tensor) -> None:
        """Note one invocation of the mechanism. distances: 3 or more, by which sampled neighbours move it."""
        self._seen.append(distances.detach().double().cpu())

    def see_halves(
        self,
        data: TrainingSet,
        flat: FlatParameters,
        own: Sequence[str],
        train: Callable[[TrainingSet, np.random.Generator], TrainingResult],
    ) -> None:
        """Note one invocation of client_local, measured by training on two halves of the site's data.

        train: trains the model of flat in place; the model is restored afterwards.
        own: names of tensors that do not leave the site.

        A single sample cannot be halved, which makes the figure void.
        """
        clip_norm = self.experiment.privacy.clip_norm
        assert clip_norm is not None
        before = flat.vector.clone()

        def release_half(half: TrainingSet) -> Tensor:
            update = train(half, self.generator).update
            flat.vector.copy_(before)
            views = flat.view_tensors(update)
            for name in own:
                views[name].zero_()
            clip(update, clip_norm)
            return update

        distances: list[float] = []
        for _ in range(self.pairs if len(data) > 1 else 0):
            one, other = (release_half(half) for half in split_halves(data, self.generator))
            distances.append(float((one - other).double().norm()))
        self.see(torch.tensor(distances))

    def keep(self) -> None:
        """Add the round to the file, before its release leaves: a crash then counts a release too often.

        Raises StateError when the file is damaged or cannot be written.
        """
        privacy = self.experiment.privacy
        assert privacy.clip_norm is not None and privacy.noise_multiplier is not None
        noise_std = privacy.noise_multiplier * privacy.clip_norm
        largest = privacy.clip_norm if privacy.mode == "sample" else 2 * privacy.clip_norm
        accountant, void, _ = _read(self.path) or (self._create_accountant(), "", privacy.delta)
        try:
            for distances in self._seen if not void else []:
                accountant.accumulate(
                    distances.numpy(), noise_std, privacy.sample_rate or 1.0, largest=largest
                )
        except PrivacyError as error:
            void = str(error)
        self._seen = []
        content = {"accountant": accountant.state_dict(), "delta": privacy.delta, "void": void}
        make_folder(self.path.parent)
        replace_file(self.path, json.dumps(content).encode())

    def _create_accountant(self) -> BayesianAccountant:
        rate = self.experiment.privacy.sample_rate
        steps = 1 if rate is None else math.ceil(self.experiment.learner.epochs / rate)
        return BayesianAccountant(self.rounds * steps)


def split_halves(data: TrainingSet, generator: np.random.Generator) -> list[TrainingSet]:
    """Two disjoint random halves of data, each sample twice, exemplars last; [] for fewer than 2 samples."""
    if len(data) < 2:
        return []
    new = len(data) - data.exemplars
    parts = []
    for half in np.array_split(generator.permutation(len(data)), 2):
        rows = np.sort(np.concatenate([half, half]))
        indices = torch.from_numpy(rows).to(data.y.device)
        parts.append(
            replace(data, x=data.x[indices], y=data.y[indices], exemplars=int(np.count_nonzero(rows >= new)))
        )
    return parts


def read_bayesian_figure(state_dir: Path, run: str) -> BayesianFigure | None:
    """The figure that a site has estimated in a run, or None. Raises StateError if its file is damaged."""
    path = _locate(state_dir, run)
    found = _read(path)
    if found is None:
        return None
    accountant, void, delta = found
    try:
        epsilon = None if void else accountant.epsilon(delta)
    except PrivacyError as error:
        epsilon, void = None, str(error)
    return BayesianFigure(epsilon, delta, accountant.invocations, accountant.planned, void)


def list_bayesian_runs(state_dir: Path) -> list[str]:
    """The runs, by their token, for which a site keeps an estimate."""
    return sorted(path.parent.name for path in state_dir.glob(f"runs/*/{FILE}"))


def _locate(state_dir: Path, run: str) -> Path:
    return state_dir / "runs" / run / FILE


def _read(path: Path) -> tuple[BayesianAccountant, str, float] | None:
    """(accountant, why the bound is void or '', delta)."""
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        accountant = BayesianAccountant.restore(content["accountant"])
        return accountant, str(content["void"]), float(content["delta"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, PrivacyError) as error:
        raise StateError(f"{path}: damaged ({error}); the figure of this run cannot be trusted") from error
