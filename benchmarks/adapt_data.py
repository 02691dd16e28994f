"""HAM10000 for benchmarks/adapt_pilot.py: its division by seed, and its images behind the frozen blocks."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.last_stages import BATCH, TRAINED, Stored
from benchmarks.table import EXPERIMENTS
from perennial.config.experiment import load_experiment
from perennial.data.federation import SimulatedFederation
from perennial.data.federation import build as build_federation
from perennial.data.site import Part
from perennial.learning.batches import TrainingSet
from perennial.models.feature_maps.ball import unit_rows
from perennial.models.feature_maps.fixed import FixedFeatures, build_fixed_features
from perennial.models.feature_maps.pretrained import build_pretrained
from perennial.models.feature_maps.symmetry import MIRRORS, Symmetric

EXPERIMENT = "analytic_ham10000_pretrained"


@dataclass(frozen=True, eq=False)
class Campaign:
    """What all seeds have in common. network: the frozen map's, as it was trained elsewhere."""

    stored: Stored
    network: Any
    frozen_minutes: float


class Division:
    """The federation of one seed: whose each image is, in which order its classes come, who is held out."""

    def __init__(self, seed: int, held_out: float = 0.0) -> None:
        changes = ["data.patient=lesion", f"data.validation_fraction={held_out}"]
        loaded = load_experiment(EXPERIMENTS / f"{EXPERIMENT}.yaml", changes, seed)
        self.seed, self.model = seed, loaded.model
        self.federation: SimulatedFederation = build_federation(loaded.data, loaded.tasks, seed)
        self.sites = {name: site.train for name, site in self.federation.sites.items()}
        assert self.federation.test is not None
        self.x, self.y = self.federation.test.x, self.federation.test.y
        self.schedule = self.federation.schedule

    def rows(self, part: Part) -> Tensor:
        """Of all sites."""
        return torch.cat([site.part(part) for site in self.federation.sites.values()])

    @property
    def test(self) -> Tensor:
        """Rows of the test images, which are the same ones with every seed."""
        assert self.federation.test is not None
        return self.federation.test.test

    def told(self, labels: Tensor) -> str:
        """One digit an image: its class's place in the order of the alphabet."""
        names = sorted(self.federation.classes)
        places = [names.index(name) for name in self.federation.classes]
        return "".join(str(places[label]) for label in labels.tolist())

    def fixed(self) -> FixedFeatures:
        """The map of today."""
        constants = self.federation.mean, self.federation.std
        shape = self.federation.input_shape
        return build_fixed_features(self.model.features or (), self.model.expansion, shape, constants)


def stored_of(fixed: FixedFeatures, data: TrainingSet, stages: int) -> tuple[Stored, float]:
    """What the frozen blocks and the other maps give for all images, and the processor's minutes for it.

    fixed: a network of timm with so many stages beside its last layer, behind a symmetry; then other maps.
    """
    first = cast(Symmetric, fixed.maps[0])
    network, mirrors = cast(Any, first.map).network, MIRRORS[first.symmetry]
    frozen = list(network.blocks[:-TRAINED])
    first_beside = len(network.blocks) - stages
    start = time.process_time()
    views, before, beside = [], [], []
    size = 0, 0
    with torch.no_grad():
        for rows in torch.arange(len(data)).split(BATCH):
            pixels = fixed.pixels(data.inputs(rows))
            of_views, of_stages = [], []
            for sides in mirrors:
                image = pixels.flip(sides) if sides else pixels
                image = (image / 255 - cast(Any, first.map).mean) / cast(Any, first.map).std
                found, averages = network.bn1(network.conv_stem(image)), []
                for position, block in enumerate(frozen):
                    found = block(found)
                    if position >= first_beside:
                        averages.append(unit_rows(found.mean(dim=(2, 3))))
                of_views.append(found.flatten(2))
                of_stages.append(torch.cat(averages, dim=1))
                size = found.shape[2], found.shape[3]
            views.append(torch.stack(of_views, dim=1))
            before.append(torch.stack(of_stages, dim=1))
            beside.append(torch.cat([unit_rows(map_(pixels)) for map_ in fixed.maps[1:]], dim=1))
    minutes = (time.process_time() - start) / 60
    return Stored(torch.cat(views), torch.cat(before), torch.cat(beside), size), minutes


def prepared(division: Division, folder: Path, say: Callable[[str], None]) -> Campaign:
    """The frozen blocks' outputs for all images, kept in the folder."""
    fixed = division.fixed()
    federation, first = division.federation, cast(Any, division.model.features)[0]
    content = hashlib.sha256(fixed.content.encode() + division.x.numpy().tobytes()).hexdigest()[:16]
    path = folder / f"{content}.safetensors"
    if not path.exists():
        say("outputs of the frozen blocks")
        data = TrainingSet(division.x, division.y, federation.mean, federation.std)
        stored, minutes = stored_of(fixed, data, first.stages)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"size": torch.tensor(stored.size), "minutes": torch.tensor([minutes])}
        tensors = {"views": stored.views, "before": stored.before, "beside": stored.beside, **facts}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    held = load_file(path)
    height, width = held["size"].tolist()
    stored = Stored(held["views"], held["before"], held["beside"], (height, width))
    # the map's own has its normalisation folded into the convolutions; training needs both
    network = build_pretrained(first, federation.input_shape, with_weights=True)[0].network
    return Campaign(stored, network, round(float(held["minutes"]), 2))
