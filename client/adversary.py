"""Simulated sites that cheat, which a method that values contributions has to detect.

A deployed site never does any of this, whatever the experiment says.
"""

from dataclasses import replace

import torch

from perennial.client.site import Site
from perennial.config.simulated_sites import AdversaryKind
from perennial.foundation.streams import stream
from perennial.learning.batches import TrainingSet


def behaviour(site: Site) -> AdversaryKind | None:
    """How this site cheats; None for an honest one."""
    if site.identity.deployed:
        return None
    return next((a.kind for a in site.experiment.adversaries if a.site == site.name), None)


def mislabelled(data: TrainingSet, num_classes: int, seed: int, site: str) -> TrainingSet:
    """data with every label replaced by another class, the same one for all samples of a class."""
    cycle = torch.from_numpy(stream(seed, "label-flip", site, num_classes).permutation(num_classes))
    wrong = torch.empty_like(cycle)
    wrong[cycle] = cycle.roll(1)
    return replace(data, y=wrong.to(data.y.device)[data.y])
