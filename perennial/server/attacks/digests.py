"""Reconstructs images from a site's digests: of one sample alone, of a mixture, of a noised mixture.

The digests are made again from the samples, in the groups in which the run released them; the noise is
seeded, for figures that repeat.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.federation import SimulatedFederation
from perennial.foundation.errors import DataError
from perennial.foundation.streams import stream, torch_seed
from perennial.models.digest_networks import FeatureEncoder
from perennial.privacy.attacks.digest_reconstruction import reconstruct_digest
from perennial.privacy.attacks.similarity import structural_similarity
from perennial.privacy.digest_config import DigestConfig
from perennial.privacy.digests import bounded, form_groups, make_digests
from perennial.privacy.noise import SeededNoise
from perennial.server.attacks.pictures import pixels_of, write_picture

REFERENCE_EPSILON = 8.0
"""Beside a run whose digests have no proven protection: Gaussian noise worth this much."""


def digest_reconstruction(
    experiment: Experiment, federation: SimulatedFederation, folder: Path, victims: int, steps: int
) -> dict[str, Any]:
    """Reconstruct images from digests, as the server that holds them could; returns the report's entry.

    victims: digests to attack. steps: of each search. Writes a picture to folder: a column for each attacked
    digest; on top the first image in it, then for each kind of release the most similar reconstruction.

    Raises DataError when no site has enough samples for one digest.
    """
    assert experiment.digests is not None
    config = experiment.digests
    frame = next(iter(federation.sites.values()))
    encoder = FeatureEncoder(frame.input_shape, experiment.seed)
    mean, std = frame.mean.view(-1, 1, 1), frame.std.view(-1, 1, 1)

    def encode(images: Tensor) -> Tensor:
        return encoder((images - mean) / std)

    groups = _groups(experiment, federation, config, victims)
    members = frame.x[groups]
    features = encode(pixels_of(members.flatten(0, 1)))
    clear = config.model_copy(update={"protection": "none"})
    noisy = config
    if config.protection == "none":
        norm = float(features.flatten(1).norm(dim=1).max())
        weakest = {"protection": "gauss", "epsilon": REFERENCE_EPSILON, "norm": norm}
        noisy = config.model_copy(update=weakest)
    alone = clear.model_copy(update={"per_digest": 1, "weights": None})
    releases = {
        "alone": (members[:, :1], alone),
        "mixed": (members, clear),
        "mixed_and_noised": (members, noisy),
    }
    originals = pixels_of(members[:, 0])
    found: dict[str, list[Tensor]] = {kind: [] for kind in releases}
    for kind, (mixtures, release) in releases.items():
        for number, stored in enumerate(mixtures):
            digest, weights = _digest(encode(pixels_of(stored)), release, experiment.seed, number)
            generator = torch.Generator().manual_seed(
                torch_seed(stream(experiment.seed, "attack-digest", number))
            )
            images = reconstruct_digest(
                lambda x, release=release: bounded(encode(x), release, release.largest or math.inf),
                digest,
                (originals.shape[1], originals.shape[2], originals.shape[3]),
                weights,
                generator,
                steps=steps,
            )
            like = structural_similarity(images, originals[number].expand_as(images))
            found[kind].append(images[int(like.argmax())])
    rebuilt = {kind: torch.stack(images) for kind, images in found.items()}
    figures: dict[str, Any] = {
        f"mean_structural_similarity_{kind}": structural_similarity(originals, images).mean().item()
        for kind, images in rebuilt.items()
    }
    figures |= {
        "digests": len(groups),
        "samples_per_digest": config.per_digest,
        "protection": config.protection,
        "noise_of_the_last_row": f"{noisy.protection}, epsilon {noisy.epsilon:g}",
    }
    return {
        "name": "Digest reconstruction: originals, from a sample alone, from its digest, from a noised one",
        "figures": figures,
        "images": [write_picture(folder, "digests.png", [originals, *rebuilt.values()])],
    }


def _groups(
    experiment: Experiment, federation: SimulatedFederation, config: DigestConfig, victims: int
) -> Tensor:
    """(D, S) rows of the samples that share a digest of task 1, of the sites in turn, D at most victims."""
    classes = federation.schedule.classes_of(1)
    found = []
    for name, site in federation.sites.items():
        indices = site.task_indices("train", classes.start, classes.stop)
        try:
            groups = form_groups(site.y[indices], config, stream(experiment.seed, "digest-groups", name, 1))
        except DataError:
            continue
        found.append(indices[groups])
    if not found:
        raise DataError(f"digests.per_digest: {config.per_digest}, and no site has as many samples in task 1")
    columns = range(max(len(groups) for groups in found))
    turns = [groups[column] for column in columns for groups in found if column < len(groups)]
    return torch.stack(turns[:victims])


def _digest(features: Tensor, config: DigestConfig, seed: int, number: int) -> tuple[Tensor, Tensor]:
    """(digest (...), weights (S,)) of the features (S, ...) of one group."""
    labels = torch.zeros(len(features), dtype=torch.int64)
    source = SeededNoise(stream(seed, "attack-digest-noise", number))
    weights = stream(seed, "attack-digest-weights", number)
    made, _ = make_digests(features, labels, range(1), config, weights, source)
    return made.features[0], made.weights[0]
