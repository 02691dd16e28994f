"""Local training in mode sample: Poisson batches, each with one clipped and noised gradient.

The rate, the number of steps and the divisor of a batch's gradient are public settings. None follows the
number of samples, which one sample changes: a site with fewer takes smaller steps, as a weighted mean would.

Abadi et al. 2016 (arXiv 1607.00133).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perennial.config.charges import count_round_steps
from perennial.config.learner import LearnerConfig
from perennial.data.config import AugmentationConfig
from perennial.foundation.devices import to_device
from perennial.foundation.errors import PrivacyError
from perennial.learning.batches import TrainingSet, augment
from perennial.learning.bayesian_estimate import NeighbourDistances
from perennial.learning.objective import Extra, Objective
from perennial.learning.optimizers import FlatOptimizer
from perennial.learning.site_method import GradientCorrection, OptionalTerm
from perennial.learning.training import TrainingResult, seed_dropout
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise
from perennial.privacy.sample_level import Losses, PrivateGradient, draw_poisson_batches


def train_privately(
    config: LearnerConfig,
    privacy: PrivacyConfig,
    model: IncrementalModel,
    flat: FlatParameters,
    data: TrainingSet,
    source: Noise,
    *,
    teacher: IncrementalModel | None = None,
    augmentation: AugmentationConfig,
    progress: float = 0.0,
    first_class: int = 0,
    correction: GradientCorrection | None = None,
    extra: Extra | None = None,
    terms: Sequence[OptionalTerm] = (),
    neighbours: NeighbourDistances | None = None,
) -> TrainingResult:
    """Train model in place by DP-SGD and return its update; its loss is private and stays at the site.

    neighbours: notes at each step how far records drawn at random would move its sum.
    correction: FedProx's pull alone, which is public. Under unit patient a batch is drawn over patients, each
    with all of theirs. Raises PrivacyError when the model, a term of the loss or the correction has no
    gradient of one sample.
    """
    assert privacy.sample_rate is not None
    before = flat.vector.clone()
    objective = Objective(
        config.drop_idle_terms(progress), model, data, teacher, augmentation.active, first_class, extra, terms
    )
    objective.require_alone()
    if correction is not None and (correction.shift is not None or correction.others):
        raise PrivacyError(
            "the strategy's correction of gradients is made of the site's data, and has no form of one "
            "sample alone; privacy.mode sample takes strategies that train by the learner's own losses"
        )
    optimizer = FlatOptimizer(config.optimizer, flat.trainable, flat.gradient, progress)
    anchor = before[: len(flat.trainable)]
    generator = create_secret_generator(source)
    steps = count_round_steps(config, privacy)
    model.train()
    flat.gradient.zero_()
    total, seen = torch.zeros((), dtype=torch.float64, device=before.device), 0

    def bind_losses(rows: Tensor) -> Losses:
        rows = to_device(rows, data.y.device)
        stored = augment(data.x[rows], augmentation, generator) if augmentation.active else data.x[rows]

        def of(indices: Tensor) -> Tensor:
            indices = to_device(indices, rows.device)
            return objective.each(rows[indices], data.floats(stored[indices]), data.y[rows[indices]])

        return of

    with (
        seed_dropout(model, generator),
        PrivateGradient(model, privacy, expected_batch=config.batch_size, source=source) as private,
    ):
        units = len(data) if data.patients is None else len(data.patients.unique())
        for drawn_units in draw_poisson_batches(units, privacy.sample_rate, steps, source):
            batch, patients = _select_samples(data, drawn_units)
            if neighbours is not None and len(data):
                drawn = neighbours.draw_records(len(data))
                neighbours.see(private.measure_clipped_norms(data.places[drawn], bind_losses(drawn)))
            mean = private.compute(data.places[batch], bind_losses(batch), patients)
            if correction is not None:
                correction.apply(flat.gradient, flat.trainable, anchor)
            optimizer.step()
            if len(batch):
                total += mean * len(batch)
            seen += len(batch)
    return TrainingResult(flat.vector - before, float(total) / max(seen, 1), steps)


def _select_samples(data: TrainingSet, units: Tensor) -> tuple[Tensor, Tensor | None]:
    """(indices of the samples, whose each is) of the units of a batch.

    A unit is a sample, or a patient with all of their samples.
    """
    if data.patients is None:
        return units, None
    batch = torch.isin(data.patients, units).nonzero()[:, 0]
    return batch, data.patients[batch]


def create_secret_generator(source: Noise) -> np.random.Generator:
    """A generator with a secret seed, for augmentation and dropout.

    What they draw depends on who is in the batch, so with a seed that others know one sample could change
    what happens to the next.
    """
    return np.random.Generator(np.random.PCG64(int.from_bytes(source.draw_words(2).tobytes())))
