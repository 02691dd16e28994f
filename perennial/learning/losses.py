"""Losses of the local learner: over the labels, by name, and the terms for distillation and contrast.

Each gives values of samples, (B,) or (B, M), whose mean is the loss of the batch, and says whether a value
follows from its sample alone: ordinary training averages them, DP-SGD clips each sample's own
(learning/objective.py). Natural logarithms.
Shapes: logits (B, M) over all M classes seen so far, labels (B,) int64, features (B, d).
"""

import inspect
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


def log_prior(counts: Tensor, scale: float, sign: int) -> Tensor:
    """The term that balanced softmax adds to the logits in training: scale * sign * log n_j for class j.

    counts: (M,) samples of each class in the site's own training set, exemplars included.
    Returns (M,) float32.
    A class that the site does not hold gets -inf, which leaves it out of the softmax, so that the site cannot
    push that class down (the limit of log n_j for n_j to 0; compare Li and Zhan 2021, FedRS).
    Raises ConfigError for sign -1 with an empty class, whose prior would be +inf.

    Ren et al. 2020 (arXiv 2007.10740), equation 4: added in training, raw logits in testing.
    """
    if sign < 0 and bool((counts == 0).any()):
        missing = (counts == 0).nonzero().flatten().tolist()
        raise ConfigError(
            f"learner.classification.sign: -1 needs samples of every class; this site has none of {missing}"
        )
    prior = counts.float().log() * (scale * sign)
    return torch.where(counts == 0, torch.full_like(prior, -torch.inf), prior)


def compute_distillation(logits: Tensor, old_logits: Tensor, temperature: float) -> Tensor:
    """(B,) KL(previous model || this model) over the old classes alone, both renormalised there.

    The loss is T^2 times their mean.

    logits: (B, M), old_logits: (B, M_old). Raises ValueError where M_old > M.
    Hinton et al. 2015 (arXiv 1503.02531).
    """
    if old_logits.shape[1] > logits.shape[1]:
        raise ValueError(
            f"old logits: found {old_logits.shape[1]} classes, allowed {logits.shape[1]} at most"
        )
    ours = F.log_softmax(logits[:, : old_logits.shape[1]] / temperature, dim=1)
    theirs = F.log_softmax(old_logits / temperature, dim=1)
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)


def compute_feature_distillation(features: Tensor, target: Tensor) -> Tensor:
    """(B, d) squared distances of features from a target that gets no gradient; their mean is the loss.

    features, target: (B, d). Romero et al. 2015 (FitNets, arXiv 1412.6550), whose target is a teacher's.
    """
    return (features.float() - target.detach().float()).square()


def compute_relation_distillation(
    logits: Tensor, labels: Tensor, old_logits: Tensor, temperature: float
) -> Tensor:
    """(B,) KL(target || this model) over all classes; the loss is T^2 times their mean.

    The target is the one-hot label with the previous model's probabilities in the old columns,
    divided by its sum.
    logits: (B, M), old_logits: (B, M_old).

    Dong et al. 2022 (GLFC, arXiv 2203.14867), section 3.2, which writes the divergence the other way round;
    the target has zeros, so that would be infinite.
    """
    target = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    target[:, : old_logits.shape[1]] = (old_logits / temperature).softmax(dim=1)
    target = target / target.sum(dim=1, keepdim=True)
    ours = F.log_softmax(logits / temperature, dim=1)
    return F.kl_div(ours, target, reduction="none").sum(dim=1)


def compute_contrastive(features: Tensor, labels: Tensor, temperature: float, form: str = "out") -> Tensor:
    """Pulls features of one class together and pushes those of different classes apart.

    The mean over the samples that have another sample of their class in the batch; 0 with zero gradient if
    there is none. One number: the samples of a batch have no values of their own here.
    Features are scaled to unit length.
    form: "out" averages over positives outside the logarithm, "in" sums them inside.

    Khosla et al. 2020 (arXiv 2004.11362), equations 2 and 3; the denominator leaves the anchor out.
    """
    unit = F.normalize(features, dim=1)
    similarity = unit @ unit.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    log_probability = similarity - similarity.masked_fill(itself, -torch.inf).logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    count = positive.sum(dim=1)
    if form == "out":
        # filled, not multiplied: in a batch of one the row is infinite, and 0 times infinity is not 0
        each = -log_probability.masked_fill(~positive, 0.0).sum(dim=1) / count.clamp(min=1)
    else:
        each = -log_probability.masked_fill(~positive, -torch.inf).logsumexp(dim=1)
        each = torch.where(count > 0, each, torch.zeros_like(each))
    anchors = count > 0
    return (each * anchors).sum() / anchors.sum().clamp(min=1)


@dataclass(frozen=True)
class Batch:
    """A batch of B samples, as a loss gets it.

    logits: (B, M), with gradient. labels: (B,) int64. features: (B, d). old_logits: (B, M_old) of the model
    of the task before, or None. first_class: the first label of this task. new_features: (B, d) of a dual
    backbone's new part alone, or None.
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
        """Prepare for training. counts: (M,) the site's samples of each class. Does nothing by default."""

    @classmethod
    def of_rows(cls, losses: "Sequence[Any]", owners: Tensor) -> "Loss | None":
        """One loss for a batch of several sites' samples; None if a sample's value depends on the batch.

        losses: of this class, one for each site, begun. owners: (B,) int64, which of them
        each sample belongs to.
        """
        return losses[0] if cls.alone else None

    def __call__(self, batch: Batch) -> Tensor:
        """(B,) values, or (B, K) of which each sample's mean counts; their mean is the loss."""
        raise NotImplementedError

    def mean(self, batch: Batch) -> Tensor:
        """The loss of the batch: the mean of its values."""
        return average_batch(self(batch))


def average_batch(values: Tensor) -> Tensor:
    """The mean of values (B,) or (B, K); of (B,) to the bits of F.cross_entropy's own mean.

    Raises ConfigError for anything else, which somebody's own loss may return.
    """
    if not isinstance(values, Tensor) or values.dim() == 0:
        found = f"{values!r:.60}".partition(", grad_fn")[0]
        raise ConfigError(f"loss: returned {found}, allowed (B,) values, one for each sample of the batch")
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
    """Cross entropies of logits shifted by the site's log-prior, so a sample's loss depends on the others.

    Ren et al. 2020 (arXiv 2007.10740), equation 4. Raises ValueError if the prior or a label is of another
    number of classes.
    """

    def __init__(self, scale: float = 1.0, sign: int = 1) -> None:
        self.scale, self.sign = scale, sign

    def begin(self, counts: Tensor) -> None:
        self.prior = log_prior(counts, self.scale, self.sign)

    @classmethod
    def of_rows(cls, losses: "Sequence[BalancedSoftmax]", owners: Tensor) -> Loss:
        """One loss in which each sample's logits are shifted by the prior of its own site."""
        together = copy(losses[0])
        together.prior = torch.stack([loss.prior for loss in losses])[owners]
        return together

    def __call__(self, batch: Batch) -> Tensor:
        logits, labels, prior = batch.logits, batch.labels, self.prior
        classes = logits.shape[1]
        if prior.shape not in ((classes,), logits.shape):
            raise ValueError(f"prior: found shape {tuple(prior.shape)}, allowed ({classes},)")
        if _has_outside(labels, 0, classes):
            raise ValueError(f"labels: found {labels.min()} to {labels.max()}, allowed 0 to {classes - 1}")
        return F.cross_entropy(logits + prior, labels, reduction="none")


class IcarlBce(Loss):
    """Binary cross entropies (B, M) whose targets for old classes are the previous model's outputs.

    Rebuffi et al. 2017 (iCaRL, arXiv 1611.07725), algorithm 3.
    """

    alone = True
    needs_previous = True

    def __call__(self, batch: Batch, reduction: str = "none") -> Tensor:
        targets = F.one_hot(batch.labels, batch.logits.shape[1]).to(batch.logits.dtype)
        if batch.old_logits is not None:
            targets[:, : batch.old_logits.shape[1]] = batch.old_logits.sigmoid()
        return F.binary_cross_entropy_with_logits(batch.logits, targets, reduction=reduction)

    def mean(self, batch: Batch) -> Tensor:
        # PyTorch divides after its gradient and not before
        return self(batch, "mean")


class GradientCompensation(Loss):
    """Cross entropies in which a sample counts by its gradient over the mean gradient of its kind.

    Classes before the task are one kind, the others the other. The gradient is |p_y - 1|, of the loss in the
    logit of the sample's own class, and no gradient flows through the weight.
    Dong et al. 2022 (GLFC, arXiv 2203.14867), equations 2 to 4.
    """

    def __call__(self, batch: Batch) -> Tensor:
        each = F.cross_entropy(batch.logits, batch.labels, reduction="none")
        size = -torch.expm1(-each.detach())
        old = batch.labels < batch.first_class
        weight = torch.ones_like(size)
        for kind in (old, ~old):
            # where every sample of a kind is certain their gradients are 0, and so is what they add
            mean = _mean_of(size, kind).clamp(min=torch.finfo(size.dtype).tiny)
            weight = torch.where(kind, size / mean, weight)
        return weight * each


class TaskTemperatures(Loss):
    """Values whose mean is w_old mean_old(CE) + w_new mean_new(CE), of logits over temperatures.

    Old are the classes before the task, new the others; a kind without samples adds nothing, and in the first
    task the loss is plain cross entropy.
    Qi et al. 2025 (FedCBDR, arXiv 2507.07712), equation 7.
    """

    temperatures, weights = (0.9, 1.1), (1.1, 0.9)
    """Of old and of new classes."""

    def __call__(self, batch: Batch) -> Tensor:
        logits, labels, first = batch.logits, batch.labels, batch.first_class
        if first == 0:
            return F.cross_entropy(logits, labels, reduction="none")
        scale = torch.full_like(logits[0], self.temperatures[1])
        scale[:first] = self.temperatures[0]
        each = F.cross_entropy(logits / scale, labels, reduction="none")
        old = labels < first
        counts = old.sum().clamp(min=1), (~old).sum().clamp(min=1)
        share = torch.where(old, self.weights[0] / counts[0], self.weights[1] / counts[1])
        return each * len(each) * share


def _has_outside(labels: Tensor, first: int, end: int) -> bool:
    """Whether a label lies outside first..end - 1.

    On a GPU the look would stop the queue in every batch, and the loss itself asserts there: False.
    """
    return labels.device.type == "cpu" and bool(((labels < first) | (labels >= end)).any())


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen ones of values (B,); NaN if there is none. chosen: (B,) bool."""
    if values.device.type == "cpu":
        return values[chosen].mean()
    # only the GPU knows how many are chosen, and asking it would stop its queue
    return (values * chosen).sum() / chosen.sum()


LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropy,
    "balanced_softmax": BalancedSoftmax,
    "icarl_bce": IcarlBce,
    "gradient_compensation": GradientCompensation,
    "task_temperatures": TaskTemperatures,
}


def build_classification(config: LearnerConfig) -> Loss:
    """Build the loss over the labels that a learner names, ours or a plug-in's.

    Raises ConfigError if a plug-in is missing, is no Loss, or does not know the options.
    """
    named = config.classification
    if named.name not in LOSSES:
        where = "learner.classification"
        made = plugins.load("loss", named.name, f"{where}.name")
        if not (inspect.isclass(made) and issubclass(made, Loss)):
            raise ConfigError(f"{where}.name: {named.name} is no subclass of {Loss.__module__}.Loss")
        return keywords.build(made, named.name, named.options, f"{where}.options")
    keys: dict[str, Any] = {}
    if named.name == "balanced_softmax":
        keys = {"scale": named.scale, "sign": named.sign}
    return LOSSES[named.name](**keys)
