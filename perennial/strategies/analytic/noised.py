"""The noise in the sums that a run has added up, and the classes that it leaves uncertain."""

from collections.abc import Mapping
from typing import Any

import torch

from perennial.config.experiment import Experiment
from perennial.config.secure_words import share_of_noise
from perennial.learning.analytic.noised import NoisedSums
from perennial.learning.analytic.statistics import Statistics, SumsForm
from perennial.models.feature_maps.ball import RADIUS_SQUARED
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noised_sums import SumsNoise
from perennial.strategies.round.run_context import RunContext


def sums_form(features: int, privacy: PrivacyConfig) -> SumsForm:
    """The form of the sums of `features` features; under privacy without constant, maybe without products."""
    if not privacy.enabled:
        return SumsForm(features + 1)
    return SumsForm(features, products=privacy.blocks[0] > 0)


def noise_of_one(width: int, experiment: Experiment) -> SumsNoise | None:
    """The noise on one site's sums of a task; None without privacy. width: of a row of sums."""
    privacy = experiment.privacy
    if not privacy.enabled or privacy.noise_multiplier is None:
        return None
    multiplier = share_of_noise(experiment, privacy.noise_multiplier)
    return SumsNoise.of(multiplier, width, privacy.blocks, RADIUS_SQUARED)


def noised_total(
    total: Statistics, contributions: Mapping[int, Mapping[str, Any]], services: RunContext
) -> tuple[NoisedSums, list[str]]:
    """(the total with its noise, warnings about classes that may be noise alone).

    Products have the noise of every release, a class's sums that of its task's.

    contributions: task -> the sites whose sums are in the total.
    """
    privacy, classes = services.experiment.privacy, total.classes
    one = noise_of_one(total.width, services.experiment)
    assert one is not None
    releases = torch.zeros(len(classes), dtype=torch.float64)
    for task, sites in contributions.items():
        of_task = services.schedule.classes_of(task)
        releases[of_task.start - classes.start : of_task.stop - classes.start] += len(sites)
    root, every = releases.sqrt(), sum(len(sites) for sites in contributions.values())
    products = one.gram * every**0.5 if privacy.blocks[0] else 0.0
    sums = NoisedSums.of(total, products, one.sums * root, one.counts * root)
    names = [str(classes.start + place) for place in sums.uncertain.nonzero().flatten().tolist()]
    said = (
        f"noise may have made all of the samples of classes {', '.join(names[:10])}"
        f"{', ...' if names[10:] else ''}: fewer than two standard deviations of it were found"
    )
    return sums, [said] if names else []
