"""Digests of a second kind: features drawn from noised sums, none of which mixes anybody's samples.

A site adds up its samples' features and products of features, adds Gaussian noise to the sums once, and draws
features for each class from the mean and the covariance that they have. What is drawn follows from the noised
sums alone, so that one release covers all of it, labels and numbers of samples too.

Symbols: n samples, l numbers in the features of one sample, M classes known in the task.
"""

import math

import numpy as np
import torch
from torch import Tensor

from perennial.foundation.errors import PrivacyError
from perennial.privacy.calibration import gaussian_multiplier
from perennial.privacy.config import UNWEIGHTED
from perennial.privacy.digest_config import DigestConfig
from perennial.privacy.digests import DigestGuarantee, Digests, bounded, usable
from perennial.privacy.discrete_gaussian import WordSource
from perennial.privacy.noised_sums import STEPS, SumsNoise, add_noise_to_sums, replacement, sensitivity

LONGEST = 2048
"""Numbers in a sample's features, beyond which the sums of products (8 l^2 bytes) are refused."""
SURE = 2.0
"""Standard deviations of its noise by which a class's count must exceed 0 to be believed."""


def drawn_digests(
    features: Tensor,
    labels: Tensor,
    classes: range,
    config: DigestConfig,
    generator: np.random.Generator,
    words: WordSource,
) -> tuple[Digests, DigestGuarantee]:
    """Draw digests from noised sums, as many of each class as the noised counts say; with their guarantee.

    features: (n, ...) float32, 0 or more; labels: (n,) int64 inside classes, the task's, which are public.
    Label columns: all classes up to the task's last. generator: of the drawn features; words: of the noise.
    Raises PrivacyError on features that are too long, and if noise leaves no class.
    """
    features = usable(features)
    guarantee = drawn_guarantee(config, features[0].numel())
    assert config.norm is not None
    rows = bounded(features, config, config.norm).flatten(1) / config.norm
    gram, sums, counts = _noised(rows, labels, classes, guarantee, words)
    std = SumsNoise.of(guarantee.scale, len(gram), UNWEIGHTED).counts
    held = counts > SURE * std
    if not bool(held.any()):
        raise PrivacyError(
            f"digests: noise of {std:.0f} samples leaves none of this site's {len(counts)} classes sure; "
            "allowed: a larger epsilon, or more samples of a class"
        )
    means = sums[held] / counts[held, None]
    total = counts[held].sum()
    within = gram / total - (means * counts[held, None]).T @ means / total
    values, vectors = torch.linalg.eigh((within + within.T) / 2)
    # what noise alone would make of the largest eigenvalue is taken for noise
    values = (values - math.sqrt(2 * len(values)) * std / total).clamp(min=0)
    root = vectors * values.sqrt()
    drawn, of = [], []
    for label, mean, count in zip(torch.tensor(classes)[held].tolist(), means, counts[held], strict=True):
        number = round(float(count))
        random = torch.from_numpy(generator.standard_normal((number, len(mean))))
        drawn.append((mean + random @ root.T).clamp(min=0) * config.norm)
        of += [label] * number
    one_hot = torch.nn.functional.one_hot(torch.tensor(of), classes.stop).float()
    made = torch.cat(drawn).float().view(-1, *features.shape[1:])
    nobody = torch.empty(0, 1)
    return Digests(made, one_hot, nobody.long(), nobody), guarantee


def drawn_guarantee(config: DigestConfig, length: int) -> DigestGuarantee:
    """The guarantee of digests drawn from noised sums over features of `length` numbers.

    Its scale is the multiplier of the noise. Raises PrivacyError when features are too long for sums of their
    products.
    """
    if length > LONGEST:
        raise PrivacyError(
            f"digests.kind: statistics: a sample's features have {length} numbers; allowed up to {LONGEST}: "
            "an encoder with fewer, or kind mixtures"
        )
    assert config.epsilon is not None
    moved = replacement(length, UNWEIGHTED, signed=False) / sensitivity(length, UNWEIGHTED)
    scale = moved * gaussian_multiplier(config.epsilon, config.delta)
    return DigestGuarantee(scale, config.epsilon, config.epsilon, config.delta, None, config.epsilon)


def _noised(
    rows: Tensor, labels: Tensor, classes: range, guarantee: DigestGuarantee, words: WordSource
) -> tuple[Tensor, Tensor, Tensor]:
    """(gram (l, l), sums (M, l), counts (M,)) float64, noised. rows: (n, l) of length 1 at most."""
    steps = torch.trunc(rows.double().cpu() * STEPS)
    members = torch.nn.functional.one_hot(labels.cpu() - classes.start, len(classes)).double()
    width = steps.shape[1]
    upper = torch.triu_indices(width, width)
    products = (steps.T @ steps).long()[upper[0], upper[1]]
    found = (members.T @ steps).long(), members.sum(dim=0).long()
    noised, sums, counts = add_noise_to_sums(products, *found, guarantee.scale, words, blocks=UNWEIGHTED)
    gram = torch.zeros(width, width, dtype=torch.float64)
    gram[upper[0], upper[1]] = noised.double() / (STEPS * STEPS)
    gram = gram + gram.T - gram.diagonal().diag()
    return gram, sums.double() / STEPS, counts.double() / STEPS
