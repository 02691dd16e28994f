"""Local training under mode sample: Poisson batches and one private gradient for each, in place of batches
and backward().

The rate, the number of steps and the divisor of a batch's gradient are public settings. None follows the
number of samples, which one sample changes: a site with fewer takes smaller steps, as a weighted mean would.

Abadi et al. 2016 (arXiv 1607.00133).
"""

import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.config.learner import LearnerConfig
from perennial.data.augmentation import augment
from perennial.data.config import AugmentationConfig
from perennial.foundation.errors import PrivacyError
from perennial.learning.batches import TrainingSet
from perennial.learning.bayesian_estimate import NeighbourDistances
from perennial.learning.frozen_outputs import outputs
from perennial.learning.optimizers import FlatOptimizer
from perennial.learning.training import TrainingResult, seeded_dropout
from perennial.models.flat import FlatParameters
from perennial.models.incremental import IncrementalModel
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import NoiseSource
from perennial.privacy.sample_level import Losses, PrivateGradient, poisson_batches


def steps_of_round(learner: LearnerConfig, privacy: PrivacyConfig) -> int:
    """Steps of one round: as many as sample each sample `epochs` times on average. Public."""
    assert privacy.sample_rate is not None
    return math.ceil(learner.epochs / privacy.sample_rate)


class SampleLosses:
    """The loss of each sample of a batch, (B,), from that sample alone.

    teacher: frozen model of the task before, or None.
    Raises PrivacyError on a classification loss or a correction that has no such form.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: IncrementalModel,
        data: TrainingSet,
        teacher: nn.Module | None,
        augmented: bool,
    ) -> None:
        if config.classification.name not in ("ce", "icarl_bce") or config.contrastive is not None:
            raise PrivacyError(
                f"learner: classification {config.classification.name!r}, contrastive "
                f"{config.contrastive is not None}; mode sample takes ce or icarl_bce, no contrastive"
            )
        if config.distillation is not None and config.distillation.form != "old_classes":
            raise PrivacyError(
                f"learner.distillation.form: found {config.distillation.form!r}; "
                "mode sample takes old_classes"
            )
        self._config, self._model, self._teacher = config, model, teacher
        self._remembered = None if teacher is None or augmented else outputs(teacher, data)

    def __call__(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """(B,) losses."""
        logits = self._model.classify(self._model.features(inputs))
        old_logits = self._old_logits(rows, inputs)
        if self._config.classification.name == "icarl_bce":
            targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
            if old_logits is not None:
                targets[:, : old_logits.shape[1]] = old_logits.sigmoid()
            loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
        else:
            loss = F.cross_entropy(logits, labels, reduction="none")
        distillation = self._config.distillation
        if distillation is not None and old_logits is not None:
            temperature = distillation.temperature
            ours = F.log_softmax(logits[:, : old_logits.shape[1]] / temperature, dim=1)
            theirs = F.log_softmax(old_logits / temperature, dim=1)
            divergence = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
            loss = loss + distillation.weight * temperature**2 * divergence
        return loss

    def _old_logits(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        if self._teacher is None:
            return None
        if self._remembered is not None:
            return self._remembered[rows]
        with torch.no_grad():
            return self._teacher(inputs)


def train_privately(
    config: LearnerConfig,
    privacy: PrivacyConfig,
    model: IncrementalModel,
    flat: FlatParameters,
    data: TrainingSet,
    source: NoiseSource,
    *,
    teacher: nn.Module | None = None,
    augmentation: AugmentationConfig,
    progress: float = 0.0,
    neighbours: NeighbourDistances | None = None,
) -> TrainingResult:
    """Train model in place by DP-SGD, and say what changed; its loss is private and stays at the site.

    neighbours: sees at each step how far records drawn at random would move its sum.
    Raises PrivacyError when the model or the learner has no gradient of one sample.
    """
    assert privacy.sample_rate is not None
    before = flat.vector.clone()
    losses = SampleLosses(config, model, data, teacher, augmentation.active)
    optimizer = FlatOptimizer(config.optimizer, flat.trainable, flat.gradient, progress)
    anchor = before[: len(flat.trainable)]
    pull = config.correction.mu if config.correction is not None else 0.0
    generator = secret_generator(source)
    steps = steps_of_round(config, privacy)
    model.train()
    flat.gradient.zero_()
    total, seen = 0.0, 0

    def losses_of(rows: Tensor) -> Losses:
        rows = rows.to(data.y.device)
        stored = augment(data.x[rows], augmentation, generator) if augmentation.active else data.x[rows]

        def of(indices: Tensor) -> Tensor:
            indices = indices.to(rows.device)
            return losses(rows[indices], data.floats(stored[indices]), data.y[rows[indices]])

        return of

    with (
        seeded_dropout(model, generator),
        PrivateGradient(model, privacy, expected_batch=config.batch_size, source=source) as private,
    ):
        for batch in poisson_batches(len(data), privacy.sample_rate, steps, source):
            if neighbours is not None:
                drawn = neighbours.records(len(data))
                neighbours.see(private.clipped_norms(len(drawn), losses_of(drawn)))
            mean = private.compute(len(batch), losses_of(batch))
            if pull:
                flat.gradient.add_(flat.trainable - anchor, alpha=pull)
            optimizer.step()
            flat.keep_frozen_rows(before)
            total += mean * len(batch) if len(batch) else 0.0
            seen += len(batch)
    return TrainingResult(flat.vector - before, total / max(seen, 1), steps)


def secret_generator(source: NoiseSource) -> np.random.Generator:
    """For augmentation and dropout: their draws depend on who is in the batch, so a seed that others know
    would let one sample change what happens to the next."""
    if source.name == "secure":
        return np.random.Generator(np.random.PCG64(int.from_bytes(os.urandom(16))))
    return np.random.Generator(np.random.PCG64(int(source.uniform(1) * 2**53)))
