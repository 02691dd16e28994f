"""perennial digest preview: what a site's digests would look like, before it agrees to send them.

Nothing is recorded, charged or sent. The noise in the preview is drawn for it alone.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.site import SiteConfig, load_site_config
from perennial.foundation import plugins
from perennial.foundation.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from perennial.client.site import Site
    from perennial.models.digest_networks import FeatureEncoder
    from perennial.privacy.digests import DigestGuarantee, Digests

PICTURE = "preview.png"
SHOWN = 6
"""Digests in the picture."""
GUIDANCE_EPOCHS = 40
ATTACK_STEPS = 400
LARGEST_SIDE = 96


@dataclass(frozen=True)
class Pictures:
    """Pictures of each digest shown, with values in [0, 1].

    samples, attacked: (S, C, H, W) of each digest: its samples, and what an attacker gets back. guidance: (C,
    H, W) of each: what the server makes of it. similarity: SSIM of the attacker's best picture of any sample.
    """

    samples: "list[Tensor]"
    guidance: "list[Tensor]"
    attacked: "list[Tensor]"
    similarity: list[float]


def preview_command(site_file: Path, experiment_file: Path, task: int, output: Path) -> str:
    """Write the picture if the data are images; returns the lines to show to the engineer.

    Raises ConfigError when the experiment makes no digests or has no such task.
    """
    config = load_site_config(site_file)
    with plugins.only(config.plugins):
        return _preview(experiment_file, config, task, output)


def _preview(experiment_file: Path, config: SiteConfig, task: int, output: Path) -> str:
    from perennial.client.identity import Identity
    from perennial.client.site import open_site
    from perennial.models.digest_networks import FeatureEncoder
    from perennial.privacy.noise import Noise
    from perennial.strategies.digest_synthesis.site import digests_of

    experiment = load_experiment(experiment_file)
    if experiment.digests is None:
        raise ConfigError(f"{experiment_file}: digests: missing; this experiment asks for none")
    site = open_site(Identity.of_site(config, experiment))
    schedule = site.process.registry.schedule
    if not 1 <= task <= schedule.count:
        raise ConfigError(f"--task: found {task}, allowed 1 to {schedule.count}")
    encoder = FeatureEncoder(site.data.input_shape, experiment.seed)
    digests, guarantee = digests_of(site, encoder, task, Noise())
    lines = _facts(site, experiment, task, digests, guarantee)
    if len(site.data.input_shape) == 3:
        pictures = pictures_of(site, encoder, task, digests)
        output.mkdir(parents=True, exist_ok=True)
        draw_pictures(pictures, output / PICTURE)
        lines += [
            f"best picture that the attack got of any sample: similarity {max(pictures.similarity):.2f} "
            f"(SSIM, 1 is the same), mean {sum(pictures.similarity) / len(pictures.similarity):.2f}",
            f"{output / PICTURE}: for each digest its samples, the server's guidance, the attack's pictures",
        ]
    return "\n".join(lines)


def _facts(
    site: "Site", experiment: Experiment, task: int, digests: "Digests", guarantee: "DigestGuarantee"
) -> list[str]:
    from perennial.privacy.digests import digest_entries, guess_log10
    from perennial.privacy.entries import RECIPIENT
    from perennial.strategies.digest_synthesis.lending import FLOAT_LEVELS

    config = experiment.digests
    assert config is not None
    classes = site.process.registry.classes
    length = digests.features[0].numel()
    shares = digests.labels.sum(0).mul(config.per_digest)
    held = [f"{classes[label]} {count:.0f}" for label, count in enumerate(shares.tolist()) if count]
    lent = "lends" if "digest" in site.identity.policy.answers else "does not lend (policy.answers)"
    lines = [
        f"site {site.name} {lent} digests; task {task}: {len(digests.features)} digests of "
        f"{config.per_digest} samples, {length} numbers each",
        f"labels as they would leave ({config.labels}): {', '.join(held)}",
        f"noise: {config.protection}, scale {guarantee.scale:.4g}; a mixed feature is "
        f"{float(digests.features.abs().mean()):.4g} in the mean, noise included",
        f"epsilon of replacing one sample's features: {_figure(guarantee.epsilon)}"
        + (f" (asked for: {guarantee.nominal:g})" if guarantee.nominal is not None else ""),
        f"epsilon of one label: {_figure(guarantee.label_epsilon)}",
        f"guess heuristic: 10^{guess_log10(length, FLOAT_LEVELS, config.per_digest):.0f} (no guarantee)",
    ]
    if guarantee.if_public is not None and not math.isfinite(guarantee.epsilon):
        lines.append(f"the published scale would be worth {guarantee.if_public:g}, were its bound public")
    if digests.short_classes:
        names = ", ".join(classes[label] for label in digests.short_classes)
        lines.append(f"too few samples for a digest of their own: {names}")
    ledger, delta = site.identity.ledger, site.identity.policy.delta
    entries = digest_entries(config, "preview", experiment.digest, RECIPIENT, guarantee)
    before, after = ledger.cost(delta), ledger.would_cost(entries[0], delta)
    lines.append(f"ledger: epsilon {_figure(before.epsilon)} now, {_figure(after.epsilon)} with this release")
    return lines


def _figure(epsilon: float) -> str:
    return f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinite (no protection)"


def pictures_of(site: "Site", encoder: "FeatureEncoder", task: int, digests: "Digests") -> Pictures:
    """Pictures of the site's first digests: samples, the server's guidance, an attacker's images."""
    import torch

    from perennial.data.augmentation import to_float
    from perennial.foundation.streams import stream, torch_seed
    from perennial.models.digest_networks import DigestTwoBranchModel, GuidanceProducer
    from perennial.models.factory import build_model
    from perennial.models.incremental import travelling
    from perennial.privacy.attacks import reconstruct_digest, structural_similarity
    from perennial.strategies.digest_synthesis.recall import Recall
    from perennial.strategies.digest_synthesis.store import spread, spread_factor

    data, experiment, config = site.data, site.experiment, site.experiment.digests
    assert config is not None
    colours, height, width = data.input_shape
    mean, std = data.mean.view(-1, 1, 1), data.std.view(-1, 1, 1)
    known = digests.labels.shape[1]
    model = build_model(experiment.model, data.input_shape, known, experiment.seed)
    if not isinstance(model, DigestTwoBranchModel):
        raise ConfigError("model.name: digests are read by digest_two_branch only")
    reference = {name: tensor.clone() for name, tensor in travelling(model).items()}
    producer = GuidanceProducer(data.input_shape, experiment.seed)
    recall = Recall(model, producer, (data.mean, data.std), experiment.learner.batch_size)
    lr = experiment.learner.optimizer.lr
    parameters = experiment.strategy.parameters
    server_lr = float(parameters.get("server_lr") or lr)
    guidance_lr = float(parameters.get("guidance_lr") or server_lr)
    apart = spread_factor(config) if parameters.get("spread") else 1.0
    features = spread(digests.features, digests.labels, apart)
    recall.joint_step(
        reference,
        features,
        digests.labels,
        GUIDANCE_EPOCHS,
        (server_lr, guidance_lr),
        stream(experiment.seed, "preview"),
    )
    schedule = site.process.registry.schedule.classes_of(task)
    indices = data.task_indices("train", schedule.start, schedule.stop)
    pictures = Pictures([], [], [], [])
    generator = torch.Generator().manual_seed(torch_seed(stream(experiment.seed, "preview-attack")))
    encoder = encoder.cpu()
    for row in range(min(SHOWN, len(digests.features))):
        stored = data.x[indices[digests.groups[row]]]
        samples = to_float(stored, torch.zeros_like(data.mean), torch.ones_like(data.std)).clamp(0, 1)
        attacked = reconstruct_digest(
            lambda images: encoder((images - mean) / std),
            digests.features[row],
            (colours, height, width),
            digests.weights[row],
            generator,
            steps=ATTACK_STEPS,
        )
        count = len(samples)
        pairs = structural_similarity(attacked.repeat_interleave(count, 0), samples.repeat(count, 1, 1, 1))
        pictures.samples.append(samples)
        pictures.attacked.append(attacked)
        pictures.similarity.append(float(pairs.max()))
        with torch.no_grad():
            pictures.guidance.append(producer(features[row : row + 1])[0])
    return pictures


def draw_pictures(pictures: Pictures, path: Path) -> None:
    """Write a PNG with one row for each digest: its samples, the guidance, what the attacker got."""
    import torch
    from PIL import Image

    rows = []
    for samples, guidance, attacked in zip(
        pictures.samples, pictures.guidance, pictures.attacked, strict=True
    ):
        tiles = [*samples, None, guidance, None, *attacked]
        blank = torch.ones(guidance.shape[0], guidance.shape[1], max(1, guidance.shape[2] // 4))
        parts = [blank if tile is None else tile for tile in tiles]
        row = torch.cat([torch.nn.functional.pad(part, (1, 1, 1, 1), value=1.0) for part in parts], dim=2)
        rows.append(row)
    sheet = torch.cat(rows, dim=1).clamp(0, 1).mul(255).round().to(torch.uint8)
    pixels = sheet.permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    scale = max(1, LARGEST_SIDE // pictures.guidance[0].shape[1])
    image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(path)
