"""Generated data: groups of sites whose nuisance directions only the whole group's samples reveal.

Four groups of four sites; the classes of a group, and one class from elsewhere at each site, lie under the
group's mean and its own nuisance directions, which thirty samples of one site do not reveal.
"""

import numpy as np
import torch

from perennial.data.config import DataConfig
from perennial.data.samples import Samples, Source, constants
from perennial.foundation.streams import stream

GROUPS, SITES_PER_GROUP, CLASSES_PER_GROUP = 4, 4, 4
TRAIN_SAMPLES, TEST_SAMPLES = 30, 100
SIDE = 8
PROTOTYPE_SCALE, GROUP_SCALE, NUISANCES, NOISE = 2.0, 1.6, 6, 0.05
COMMON_SHARE = 0.8


def load_synth_groups(config: DataConfig, seed: int) -> Source:
    """float32 (N, 1, 8, 8), 16 classes; sites "group-G-site-S" with 30 training and 100 test samples each.

    x = prototype of the class + mean of the group + sum_j a_j nuisance_j + noise, a_j ~ N(0, 1). A label is
    one of the group's classes with probability 0.8, else the one class that the site has from another group.
    """
    generator = stream(seed, "synth-groups")
    classes = GROUPS * CLASSES_PER_GROUP
    prototypes = PROTOTYPE_SCALE * _smooth(generator, classes)
    group_means = GROUP_SCALE * _smooth(generator, GROUPS)
    nuisances = _smooth(generator, GROUPS * NUISANCES).reshape(GROUPS, NUISANCES, SIDE, SIDE)
    group_of_site = np.repeat(np.arange(GROUPS), SITES_PER_GROUP)
    elsewhere = generator.integers(0, classes - CLASSES_PER_GROUP, len(group_of_site))
    extra = (CLASSES_PER_GROUP * (group_of_site + 1) + elsewhere) % classes

    count = TRAIN_SAMPLES + TEST_SAMPLES
    site = np.repeat(np.arange(len(group_of_site)), count)
    group = group_of_site[site]
    own = CLASSES_PER_GROUP * group + generator.integers(0, CLASSES_PER_GROUP, len(site))
    label = np.where(generator.random(len(site)) < COMMON_SHARE, own, extra[site])
    strength = generator.standard_normal((len(site), NUISANCES))
    noise = NOISE * generator.standard_normal((len(site), SIDE, SIDE))
    fields = (
        prototypes[label] + group_means[group] + np.einsum("nj,njhw->nhw", strength, nuisances[group]) + noise
    )

    everything = Samples(
        torch.from_numpy(fields[:, None].astype(np.float32)),
        torch.from_numpy(label),
        torch.from_numpy(site),
        tuple(
            f"group-{index // SITES_PER_GROUP}-site-{index % SITES_PER_GROUP}" for index in range(len(extra))
        ),
    )
    is_test = torch.from_numpy(np.tile(np.arange(count) >= TRAIN_SAMPLES, len(group_of_site)))
    train = everything.pick(torch.nonzero(~is_test).squeeze(1))
    test = everything.pick(torch.nonzero(is_test).squeeze(1))
    names = tuple(f"class-{index:02d}" for index in range(classes))
    return Source(train, test, names, *constants(config.normalise, train.x, (0.0,), (1.0,)))


def _smooth(generator: np.random.Generator, count: int) -> np.ndarray:
    """(count, 8, 8) normal fields on the torus, averaged over 3x3 neighbours, each of unit L2 norm."""
    fields = generator.standard_normal((count, SIDE, SIDE))
    shifts = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    smooth = np.mean([np.roll(fields, shift, axis=(1, 2)) for shift in shifts], axis=0)
    return smooth / np.linalg.norm(smooth, axis=(1, 2), keepdims=True)
