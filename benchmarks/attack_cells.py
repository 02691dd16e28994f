"""Every attack that privacy/exposure_table.py names, with the experiment and the policy that it meets.

The site approved the experiment. In a cell whose protection is noise the budget is the largest for which
`site check` says no (epsilon 10 for one release), so that the noise is the least.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import hostile_server, hostile_sums
from benchmarks.attacked_hospital import BASE, Hospital
from benchmarks.attacked_hospital import EVERYTHING as USUAL
from benchmarks.hostile_images import Outcome
from perennial.client.exposure import protections
from perennial.config.site import SitePolicy
from perennial.privacy.exposure_table import ADVERSARIES, TABLE, Cell, Protection

EVERYTHING = [*USUAL, "statistics"]
PEER = {"b": "0" * 32}
OPEN = {"answers": EVERYTHING, "max_repeats": 10**6, "max_evaluations": 10**6}
BUDGET = {"max_epsilon": 10.0, "delta": 1e-4}
POLICIES: dict[Protection, dict[str, Any]] = {
    "shut": {"answers": []},
    "clear": OPEN | {"min_samples": 20, "below_floor": ["prototypes", "digest"]},
    "few": OPEN | {"max_evaluations": 20},
    "floor": OPEN | {"min_samples": 20},
    "central": OPEN | {"require_privacy": "client_central", "max_epsilon": 1e9},
    "masks": OPEN | {"require_secure": True},
    "unpinned": OPEN | {"require_privacy": "client_shared", **BUDGET},
    "shared": OPEN | {"require_privacy": "client_shared", "peers": PEER, **BUDGET},
    "weak": OPEN | {"require_privacy": "sample", "max_epsilon": 1e9},
    "noise": OPEN | {"require_privacy": "sample", **BUDGET},
}
"""A policy that gives each protection, where no other one is needed."""
OTHER_POLICIES: dict[tuple[str, Protection], dict[str, Any]] = {
    ("counts of right answers", "clear"): OPEN,
    ("sums of features", "clear"): OPEN,
    ("sums for class means", "weak"): OPEN | {"require_privacy": "client_local", "max_epsilon": 1e9},
    ("sums for class means", "noise"): OPEN | {"require_privacy": "client_local", **BUDGET},
}
BIG = {"source": "digits", "sites": 2, "partition": {"kind": "iid"}}
FEW = BASE["data"] | {"samples_limit": 30}
HELD_OUT = BASE["data"] | {"test_fraction": 0.02}
WITHOUT = {"federated": False}
MEANS = BASE["learner"] | {"memory": {"per_class": 25}, "classifier": "nearest_mean", "means": "global"}
SILENT: dict[str, Any] = {
    "data": BIG,
    "model": {"name": "mlp", "hidden": [hostile_sums.MANY]},
    "strategy": {
        "name": "clustered_personalisation",
        "base": "fedavg",
        "global_rounds": 1,
        "clusters": 2,
        "personal": [],
    },
    "tasks": {"count": 1, "rounds": 2},
    "evaluation": WITHOUT,
}
CLOSED: dict[str, Any] = {
    "data": FEW,
    "model": {"name": "features", "features": ["inputs"]},
    "learner": None,
    "strategy": {"name": "analytic", "head": "ridge", "shrinkage": 0.1},
}
NOISED = CLOSED | {"strategy": {"name": "analytic", "head": "gaussian"}, "evaluation": WITHOUT}
DIGESTS = dict(hostile_server.ATTACKS["digests of one sample"].changes)
LAPLACE = {
    "per_digest": 1,
    "protection": "laplace",
    "largest": 1.0,
    "labels": "randomised",
    "label_epsilon": 1.0,
}
LOCAL = {"mode": "client_local", "clip_norm": 1.0}
ONE_STEP = {"mode": "sample", "clip_norm": 1.0, "sample_rate": 1.0, "delta": 1e-4}
SUMS = {"mode": "sample", "release": "sums"}
SHARED = {"mode": "client_shared", "clip_norm": 1.0, "accountant": "rdp", "noise_multiplier": 1.0}
LEAST, LITTLE = 0.6, 1e-3
"""Noise multipliers: of one release that costs about epsilon 10, and of one that costs a million."""
Run = Callable[[Hospital], Outcome]
ATTACKS: dict[str, tuple[Mapping[str, Any], Run]] = {
    name: (attack.changes, attack.run) for name, attack in hostile_server.ATTACKS.items()
} | {
    "update in mode sample, imprinted model": (
        {"privacy": ONE_STEP | {"noise_multiplier": LEAST}, "evaluation": WITHOUT},
        hostile_server.imprint,
    ),
    "few counts, pixel by pixel": ({"data": HELD_OUT}, hostile_server.counted_pixels),
    "noised counts, pixel by pixel": (
        {
            "data": HELD_OUT,
            "privacy": ONE_STEP | {"noise_multiplier": LEAST},
            "evaluation": {"federated": True, "noise_multiplier": LEAST},
        },
        hostile_server.counted_pixels,
    ),
    "weakly noised counts, pixel by pixel": (
        {
            "data": HELD_OUT,
            "privacy": ONE_STEP | {"noise_multiplier": LITTLE},
            "evaluation": {"federated": True, "noise_multiplier": 0.02},
        },
        hostile_server.counted_pixels,
    ),
    "class means, the brightest image": ({"data": BIG, "learner": MEANS}, hostile_sums.brightest_of_class),
    "noised class means, the brightest image": (
        {
            "data": BIG,
            "learner": MEANS,
            "privacy": LOCAL | {"noise_multiplier": 2 * LEAST},
            "evaluation": WITHOUT,
        },
        hostile_sums.brightest_of_class,
    ),
    "digests of as many as the floor": (DIGESTS | {"digests": {"per_digest": 20}}, hostile_server.digests),
    "digests in Laplace noise": (DIGESTS | {"digests": LAPLACE | {"epsilon": 9.0}}, hostile_server.digests),
    "sparsity, the brightest image": (SILENT, hostile_sums.brightest_by_silence),
    "noised sparsity, the brightest image": (SILENT, hostile_sums.noised_by_silence),
    "weakly noised sums of one sample's features": (
        NOISED | {"privacy": SUMS | {"noise_multiplier": LITTLE}},
        hostile_sums.sums_of_one,
    ),
    "sums of one sample's features": (CLOSED, hostile_sums.sums_of_one),
    "noised sums of one sample's features": (
        NOISED | {"privacy": SUMS | {"noise_multiplier": LEAST}},
        hostile_sums.sums_of_one,
    ),
}
"""Name -> what it changes of the hospital's experiment, and the program."""
MASKED_SUMS = {key: value for key, value in CLOSED.items() if key != "data"}
MASKED: dict[str, Callable[[Path], Outcome]] = {
    "masked sum, imprinted model": hostile_sums.masked_update,
    "masked sum, imprinted model, with noise": lambda folder: hostile_sums.masked_update(
        folder, privacy=SHARED
    ),
    "masked words of one site": hostile_sums.masked_words,
    "masked sums of features": lambda folder: hostile_sums.masked_sums(folder, **MASKED_SUMS),
    "masked sums of features, with noise": lambda folder: hostile_sums.masked_sums(
        folder,
        **MASKED_SUMS
        | {
            "strategy": {"name": "analytic", "head": "gaussian"},
            "privacy": SUMS | {"mode": "sample_shared", "accountant": "rdp", "noise_multiplier": LEAST},
        },
    ),
}
"""Attacks on sums of three sites that the real protocol opens; policies play no part in them."""
SECURE = {"least": 3, "quorum": 3, "assumed_colluders": 0}
MODELS: dict[Protection, dict[str, Any]] = {
    "clear": {},
    "masks": {"secure": SECURE},
    "central": {"privacy": LOCAL | {"mode": "client_central", "noise_multiplier": LEAST}},
    "unpinned": {"privacy": SHARED, "secure": SECURE},
    "shared": {"privacy": SHARED, "secure": SECURE},
    "weak": {"privacy": ONE_STEP | {"noise_multiplier": LITTLE, "clip_norm": 1e6}},
    "noise": {"privacy": ONE_STEP | {"noise_multiplier": LEAST}},
}
"""What the sites' experiment has where another site looks at the models."""


@dataclass(frozen=True)
class Tried:
    """One attack in one cell of the table."""

    channel: str
    protection: Protection
    adversary: str
    attack: str
    claimed: bool
    recovered: int
    of: int
    refusal: str


def policy_of(cell: Cell) -> dict[str, Any]:
    """A policy under which a channel has this protection. Raises AssertionError where it has another."""
    policy = OTHER_POLICIES.get((cell.channel, cell.protection), POLICIES[cell.protection])
    found = protections(SitePolicy.model_validate(policy))[cell.channel]
    assert found == cell.protection, (cell, found)
    return policy


def tried(cell: Cell, adversary: str, folder: Path) -> Tried:
    """Run the attack that a cell names."""
    place = ADVERSARIES.index(adversary)
    name, claimed = cell.attacks[place], cell.images[place]
    assert claimed is not None
    outcome = run(name, policy_of(cell), folder, cell.protection)
    return Tried(
        cell.channel,
        cell.protection,
        adversary,
        name,
        claimed,
        outcome.recovered,
        outcome.of,
        outcome.refusal,
    )


def run(name: str, policy: Mapping[str, Any], folder: Path, protection: Protection) -> Outcome:
    """One attack by name against a site with a policy."""
    if name in MASKED:
        return MASKED[name](folder)
    if name == "difference of two models":
        return hostile_sums.model_difference(folder, **MODELS[protection])
    changes, program = ATTACKS[name]
    return program(Hospital(folder, policy, **changes))


def cells() -> list[tuple[Cell, str]]:
    """Every place of the table that names an attack."""
    return [
        (cell, adversary)
        for cell in TABLE.values()
        for adversary, images in zip(ADVERSARIES, cell.images, strict=True)
        if images is not None and cell.attacks[ADVERSARIES.index(adversary)]
    ]
