"""Losses over the labels, by name.

Each says what every sample of a batch costs, and whether that follows from the sample alone.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.config.learner import LearnerConfig
from perennial.foundation import keywords, plugins
from perennial.foundation.errors import ConfigError
from perennial.learning.losses import (
    balanced_softmax,
    current_softmax,
    gradient_compensation,
    icarl_bce,
    log_prior,
    task_temperatures,
)


@dataclass(frozen=True)
class Batch:
    """What a loss sees of a batch of B samples.

    logits: (B, M), with gradient. labels: (B,) int64. features: (B, d). old_logits: (B, M_old) of the model
    of the task before, or None. first_class: the first label of this task. new_features: (B, d) of the new
    backbone alone, of which a dual backbone's features are one part; None without an old one.
    """

    logits: Tensor
    labels: Tensor
    features: Tensor
    old_logits: Tensor | None = None
    first_class: int = 0
    new_features: Tensor | None = None


class Loss:
    """A loss over the labels. Its keys in an experiment are the keywords of its constructor.

    alone: whether a sample's values follow from that sample alone; DP-SGD refuses a loss that
    does not say so.
    needs_previous: whether it needs old_logits.
    """

    alone: ClassVar[bool] = False
    needs_previous: ClassVar[bool] = False

    def begin(self, counts: Tensor) -> None:
        """Called when training begins. counts: (M,) the site's samples of each class. Default: nothing."""

    @classmethod
    def of_rows(cls, losses: "Sequence[Any]", owners: Tensor) -> "Loss | None":
        """One loss for the samples of several sites in one batch; None if the batch decides a sample's value.

        losses: of this class, one of each site, begun. owners: (B,) int64, which of them
        each sample belongs to.
        """
        return losses[0] if cls.alone else None

    def __call__(self, batch: Batch) -> Tensor:
        """(B,) values, or (B, K) of which each sample's mean counts; their mean is the loss."""
        raise NotImplementedError

    def mean(self, batch: Batch) -> Tensor:
        """The loss of the batch: the mean of its values."""
        return batch_mean(self(batch))


def batch_mean(values: Tensor) -> Tensor:
    """The mean of values (B,) or (B, K); of (B,) to the bits of F.cross_entropy's own mean."""
    if values.dim() > 1:
        return values.mean()
    # the kernel behind cross_entropy adds up in an order of its own
    return F.nll_loss(-values[:, None], torch.zeros_like(values, dtype=torch.int64))


class CrossEntropy(Loss):
    """Softmax cross entropy over all classes seen so far."""

    alone = True

    def __call__(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.logits, batch.labels, reduction="none")

    def mean(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.logits, batch.labels)


class BalancedSoftmax(Loss):
    """See losses.balanced_softmax; the prior is the site's, so a sample's loss depends on the others."""

    def __init__(self, scale: float = 1.0, sign: int = 1) -> None:
        self.scale, self.sign = scale, sign

    def begin(self, counts: Tensor) -> None:
        self.prior = log_prior(counts, self.scale, self.sign)

    @classmethod
    def of_rows(cls, losses: "Sequence[BalancedSoftmax]", owners: Tensor) -> Loss:
        """Each sample has the prior of its site."""
        together = copy(losses[0])
        together.prior = torch.stack([loss.prior for loss in losses])[owners]
        return together

    def __call__(self, batch: Batch) -> Tensor:
        return balanced_softmax(batch.logits, batch.labels, self.prior)


class CurrentSoftmax(Loss):
    """See losses.current_softmax."""

    alone = True

    def __call__(self, batch: Batch) -> Tensor:
        return current_softmax(batch.logits, batch.labels, batch.first_class)


class IcarlBce(Loss):
    """See losses.icarl_bce."""

    alone = True
    needs_previous = True

    def __call__(self, batch: Batch) -> Tensor:
        return icarl_bce(batch.logits, batch.labels, batch.old_logits)

    def mean(self, batch: Batch) -> Tensor:
        return icarl_bce(batch.logits, batch.labels, batch.old_logits, "mean")


class GradientCompensation(Loss):
    """See losses.gradient_compensation; a sample counts by its share of the batch's gradients."""

    def __call__(self, batch: Batch) -> Tensor:
        return gradient_compensation(batch.logits, batch.labels, batch.first_class)


class TaskTemperatures(Loss):
    """See losses.task_temperatures; a sample counts by how many of its kind are in the batch."""

    def __init__(self, temperatures: tuple[float, float], weights: tuple[float, float]) -> None:
        self.temperatures, self.weights = temperatures, weights

    def __call__(self, batch: Batch) -> Tensor:
        return task_temperatures(
            batch.logits, batch.labels, batch.first_class, self.temperatures, self.weights
        )


LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropy,
    "balanced_softmax": BalancedSoftmax,
    "icarl_bce": IcarlBce,
    "current_softmax": CurrentSoftmax,
    "gradient_compensation": GradientCompensation,
    "task_temperatures": TaskTemperatures,
}


def classification(config: LearnerConfig) -> Loss:
    """The loss over the labels that a learner names."""
    named = config.classification
    if named.name not in LOSSES:
        where = "learner.classification"
        made = plugins.load("loss", named.name, f"{where}.name")
        loss = keywords.build(made, named.name, named.options, f"{where}.options")
        if not isinstance(loss, Loss):
            raise ConfigError(f"{where}.name: {named.name} is no subclass of {Loss.__module__}.Loss")
        return loss
    keys: dict[str, Any] = {}
    if named.name == "balanced_softmax":
        keys = {"scale": named.scale, "sign": named.sign}
    if named.name == "task_temperatures":
        keys = {"temperatures": named.temperatures, "weights": named.weights}
    return LOSSES[named.name](**keys)
