"""Digests: mixtures of the features of several samples, noised, which a server may keep for absent sites.

Symbols: n samples, S samples in a digest, D = floor(n / S) digests, l numbers in the features of one sample,
M classes known in the task.

A sample is in one digest at most, so replacing it by another in its row changes one digest, by 1 / S
of the change of its features. That, and not the mean over a whole data set for which the paper sizes its
noise, is what the guarantees here are computed from. Rows are mixed by their number, so that a sample that
lies at another row, or is more or less, mixes the others anew, which no noise here covers: sites that demand
a protection or have a budget send none (client/policy.py).

Hsu, Chang and Chen 2022 (arXiv 2210.00737), sections IV-B and IV-C.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import DataError
from perennial.foundation.site_log import log
from perennial.privacy.accountants import (
    compute_digest_l1_sensitivity,
    compute_digest_l2_sensitivity,
    solve_gaussian_multiplier,
)
from perennial.privacy.config import DigestConfig
from perennial.privacy.entries import Entry
from perennial.privacy.noise import Noise, add_laplace, add_noise

EULER = 0.5772156649015329
DELTA = 1e-5
"""Of protection gauss."""
IN_ITS_ROW = "for a sample that is replaced in its row"
SAMPLE_CONSTANT = 20000
"""S of the published scale: samples that the paper takes to be in one mean."""


@dataclass(frozen=True)
class Digests:
    """Mixed features and labels.

    features: (D, ...) float32.
    labels: (D, M) float32, each row on the simplex.
    groups: (D, S) int64, rows of the site's samples that each digest mixes; they stay at the site.
    short_classes: classes with too few samples for a digest of their own.
    """

    features: Tensor
    labels: Tensor
    groups: Tensor
    short_classes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DigestGuarantee:
    """The guarantee that the noise on digests gives. scale: of Laplace noise, or Gaussian standard deviation.

    nominal: the epsilon that was asked for. epsilon: what replacing one sample can really cost, for features
    alone; infinite without a proof. if_public: the epsilon that the published scale would have, were its
    bound public.
    label_epsilon: of the labels; infinite when they leave in the clear.
    """

    scale: float
    nominal: float | None
    epsilon: float
    delta: float
    if_public: float | None
    label_epsilon: float


def draw_groups(labels: Tensor, config: DigestConfig, generator: np.random.Generator) -> Tensor:
    """Draw (D, S) groups of rows, each row in one group at most. labels: (n,) int64.

    With mix "within_class" a group has one class. Raises DataError if no group can be filled.
    """
    size = config.per_digest
    order = torch.from_numpy(generator.permutation(len(labels)))
    if config.mix == "random":
        pools = [order]
    else:
        shuffled = labels[order]
        pools = [order[shuffled == label] for label in labels.unique().tolist()]
    groups = torch.cat([pool[: len(pool) // size * size].view(-1, size) for pool in pools])
    if len(groups) == 0:
        raise DataError(
            f"digests.per_digest: {size}, but this site has {len(labels)} samples in this task"
            + (" and fewer than that of every class" if config.mix == "within_class" else "")
        )
    return groups


def mix(
    features: Tensor, labels: Tensor, num_classes: int, config: DigestConfig, generator: np.random.Generator
) -> Digests:
    """Mix digests without noise. features: (n, ...) float32; labels: (n,) int64 in 0 .. num_classes - 1."""
    groups = draw_groups(labels.cpu(), config, generator)
    place = groups.to(features.device)
    share = torch.full(groups.shape, 1 / config.per_digest, device=features.device)
    one_hot = torch.nn.functional.one_hot(labels, num_classes).float()
    counts = torch.bincount(labels.cpu(), minlength=num_classes).tolist()
    short = [label for label, count in enumerate(counts) if 0 < count < config.per_digest]
    return Digests(
        torch.einsum("ds,ds...->d...", share, features[place]),
        torch.einsum("ds,dsm->dm", share, one_hot[place]),
        groups,
        tuple(short) if config.mix == "within_class" else (),
    )


def make_digests(
    features: Tensor,
    labels: Tensor,
    classes: range,
    config: DigestConfig,
    generator: np.random.Generator,
    source: Noise,
) -> tuple[Digests, DigestGuarantee]:
    """The digests that may leave, with their noise, and what that guarantees.

    classes: the task's labels, which are public. features: (n, ...) float32, 0 or more; labels: (n,) int64
    inside classes. Label columns: all classes up to the task's last. Raises DataError on too few samples.
    """
    features = clean_features(features)
    largest = config.largest if config.largest is not None else float(features.max())
    inside = clip_features(features, config, largest)
    answers = labels
    if config.label_epsilon is not None:
        answers = draw_randomised_labels(labels, classes, config.label_epsilon, source)
    digests = mix(inside, answers, classes.stop, config, generator)
    guarantee = compute_guarantee(config, features[0].numel(), largest)
    noised = digests.features.reshape(-1)
    if config.protection == "gauss":
        add_noise(noised, guarantee.scale, source)
    else:
        add_laplace(noised, guarantee.scale, source)
    released = noised.view_as(digests.features)
    whole = Digests(released, digests.labels, digests.groups, digests.short_classes)
    return whole, guarantee


def clean_features(features: Tensor) -> Tensor:
    """(n, ...) features, 0 or more, by which noise is sized.

    A sample whose features are not all finite counts as zeros, and a negative value as 0: a refusal would
    tell of one sample without a charge.
    """
    finite = features.flatten(1).isfinite().all(dim=1)
    if bool(finite.all()) and bool((features >= 0).all()):
        return features
    log.warning("digests: features of some samples are negative or not finite; these values count as 0")
    return torch.where(finite.view(-1, *[1] * (features.ndim - 1)), features, 0.0).clamp(min=0)


def compute_guarantee(config: DigestConfig, length: int, largest: float) -> DigestGuarantee:
    """The noise that config asks for, and what it guarantees for one sample.

    length: numbers in a digest. largest: bound of a feature.
    """
    weight = 1 / config.per_digest
    change = compute_digest_l1_sensitivity(length, largest, weight)
    scale, honest, delta, if_public = 0.0, math.inf, 0.0, None
    if config.protection == "paper":
        assert config.epsilon is not None
        scale = largest / (SAMPLE_CONSTANT * config.epsilon)
        if_public = change / scale if scale else math.inf
        honest = if_public if config.largest is not None else math.inf
    elif config.protection == "laplace":
        assert config.epsilon is not None
        scale, honest = change / config.epsilon, config.epsilon
    elif config.protection == "gauss":
        assert config.epsilon is not None and config.norm is not None
        sensitivity = compute_digest_l2_sensitivity(config.norm, weight, non_negative=True)
        scale = sensitivity * solve_gaussian_multiplier(config.epsilon, DELTA)
        honest, delta = config.epsilon, DELTA
    return DigestGuarantee(scale, config.epsilon, honest, delta, if_public, config.label_epsilon or math.inf)


def draw_randomised_labels(labels: Tensor, classes: range, epsilon: float, source: Noise) -> Tensor:
    """Each label as it is with probability e^epsilon / (e^epsilon + C - 1), else another of the C classes.

    Warner 1965; pure epsilon for the change of one label.
    """
    count = len(classes)
    if count == 1:
        return labels
    # 1 / (1 + (C - 1) e^-epsilon): the same share, and finite for every epsilon
    kept = 1 / (1 + (count - 1) * math.exp(-epsilon))
    lie = source.uniform(len(labels)).to(labels.device) > kept
    draws = 1 - source.uniform(len(labels)).to(labels.device)
    shift = 1 + (draws * (count - 1)).long().clamp_max(count - 2)
    others = classes.start + (labels - classes.start + shift) % count
    return torch.where(lie, others, labels)


def guess_log10(length: int, levels: int, per_digest: int) -> float:
    """log10 of the probability P_crt of section IV-C that a guess of the mixed features is right.

    levels: values that one feature can take, 1 .. I, each as likely. A feature of sum V is one of
    C(V + S - 1, V) sums of S non-negative integers. A heuristic and no guarantee: features are neither
    uniform nor independent, an attacker need not be exact, and noise does not enter. 0 for S = 1.
    """
    if per_digest == 1:
        return 0.0
    if per_digest == 2:
        total = _sum_harmonic(levels + 1) - 1
    else:
        # 1 / C(n, m) = m / (m - 1) * (1 / C(n - 1, m - 1) - 1 / C(n, m - 1)) telescopes over n
        m = per_digest - 1
        last = math.exp(
            math.lgamma(m) + math.lgamma(levels + 2) - math.lgamma(m + levels + 1)
            if levels < 1 << 20
            else math.lgamma(m) - (m - 1) * math.log(levels + 1)
        )
        total = m / (m - 1) * (1 / m - last)
    return length * (math.log10(total) - math.log10(levels))


def _sum_harmonic(count: int) -> float:
    if count < 1000:
        return math.fsum(1 / value for value in range(1, count + 1))
    return math.log(count) + EULER + 1 / (2 * count) - 1 / (12 * count**2)


def clip_features(features: Tensor, config: DigestConfig, largest: float) -> Tensor:
    """Features cut to the bound that sizes the noise: L2 norm with "gauss", else 0 to largest."""
    if config.protection == "gauss":
        assert config.norm is not None
        rows = features.flatten(1)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return (rows * (config.norm / norms.clamp_min(config.norm))).view_as(features)
    return features.clamp(0, largest)


def build_digest_entries(
    config: DigestConfig, run: str, experiment: str, recipient: str, guarantee: DigestGuarantee | None = None
) -> list[Entry]:
    """Ledger entries for a release of digests: for the features, and for the labels if they have noise.

    guarantee: for the note of digests without a proof.
    """
    common: dict[str, Any] = {
        "run": run,
        "experiment": experiment,
        "recipient": recipient,
        "kind": "digest",
        "unit": "sample",
        "relation": "replace",
    }
    if not config.protects:
        note = ""
        if guarantee is not None and guarantee.nominal is not None:
            note = f"nominal epsilon {guarantee.nominal:g}; with a public scale {guarantee.if_public:g}"
        return [Entry(**common, mechanism="unprotected", note=note)]
    note = IN_ITS_ROW + ("; labels are public" if config.labels_in_the_clear else "")
    assert config.epsilon is not None
    numbers: dict[str, Any] = {"mechanism": "stated", "epsilon": config.epsilon, "delta": 0.0}
    if config.protection == "gauss":
        multiplier = solve_gaussian_multiplier(config.epsilon, DELTA)
        numbers = {"mechanism": "gaussian", "noise_multiplier": multiplier, "sample_rate": 1.0, "steps": 1}
    entries = [Entry(**common, **numbers, note=note)]
    if config.label_epsilon is not None:
        labels = {"mechanism": "stated", "epsilon": config.label_epsilon, "delta": 0.0}
        entries.append(
            Entry(**common, **labels, note=f"labels of the digests, by randomised response; {IN_ITS_ROW}")
        )
    return entries
