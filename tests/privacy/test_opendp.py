"""What the ledger charges for sums and counts, against OpenDP's stability and privacy maps.

OpenDP is large, so it is in the extra `oracle`, and these tests have a stage of their own (make test-oracle).
"""

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch

from perennial.models.feature_maps.projection import RADIUS_SQUARED, round_to_grid
from perennial.privacy.composition import compose
from perennial.privacy.config import BLOCKS, Blocks, PrivacyConfig
from perennial.privacy.entries import RECIPIENT, Entry
from perennial.privacy.noised_sums import STEPS, compute_sensitivity
from tests.privacy.test_noised_sums import collected, moved

dp = pytest.importorskip("opendp.prelude", reason="needs the extra oracle (make test-oracle)")
pytestmark = pytest.mark.slow
CLASSES, DELTA = 3, 1e-5
WEIGHTS = [BLOCKS, (0.0, 1.0, 0.2), (1.0, 1.0, 1.0), (0.5, 0.1, 0.9)]


@pytest.fixture(autouse=True)
def opendp_features() -> None:
    dp.enable_features("contrib", "honest-but-curious", "idealized-numerics")


def releases(rows: torch.Tensor, labels: torch.Tensor, blocks: Blocks) -> np.ndarray:
    """(n, D^2 + C D + C) of each row: what it adds to (a G, b S, c n), features in units of their radius."""
    phi = (rows.double() / math.sqrt(RADIUS_SQUARED)).numpy()
    one_hot = np.eye(CLASSES)[labels.numpy()]
    a, b, c = blocks
    products = np.einsum("ni,nj->nij", phi, phi).reshape(len(phi), -1)
    return np.concatenate(
        [a * products, b * np.einsum("nk,ni->nki", one_hot, phi).reshape(len(phi), -1), c * one_hot], axis=1
    )


def sum_of_rows(columns: int, norm: float) -> Any:
    """OpenDP's sum of rows of a bounded norm, with its stability map."""
    arrays = importlib.import_module("opendp.extras.numpy")
    sums = importlib.import_module("opendp.extras.numpy._make_np_sum")
    domain = arrays.array2_domain(norm=norm, p=2, origin=0.0, num_columns=columns, nan=False, T=float)
    return sums.make_np_sum(domain, dp.symmetric_distance())


@pytest.mark.parametrize("blocks", WEIGHTS)
def test_sums_and_their_sensitivity_agree(blocks: Blocks) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = round_to_grid(torch.randn(40, 6, generator=generator))
    labels = torch.randint(0, CLASSES, (40,), generator=generator)
    each = releases(rows, labels, blocks)
    norm = math.hypot(*blocks)
    assert np.linalg.norm(each, axis=1).max() <= norm * (1 + 1e-12), "every row is in the domain"
    total = sum_of_rows(each.shape[1], norm)
    # the same sums: one row more moves ours by what it moves OpenDP's, but for the rounding of products
    one_more = np.array(total(each)) - np.array(total(each[1:]))
    ours = moved(collected(rows[1:], labels[1:]), collected(rows, labels), blocks)
    assert ours == pytest.approx(float(np.linalg.norm(one_more)), abs=blocks[0] * 6 / STEPS + 1e-6)
    # the same bound, plus that rounding
    assert total.map(1) <= compute_sensitivity(6, blocks) <= total.map(1) + blocks[0] * 6 / STEPS


def test_one_sample_moves_counts_by_class_by_one() -> None:
    counts = dp.t.make_count_by_categories(
        dp.vector_domain(dp.atom_domain(T=int)),
        dp.symmetric_distance(),
        list(range(CLASSES)),
        MO="L2Distance<i32>",
        null_category=False,
    )
    assert counts([0, 2, 2, 1]) == [1, 1, 2]
    assert counts.map(1) == compute_sensitivity(0, (0.0, 0.0, 1.0)) == 1


def charged(multiplier: float, tasks: int) -> float:
    """Epsilon of the ledger after this many releases of sums that hold the same rows."""
    privacy = PrivacyConfig.model_validate(
        {"mode": "sample", "release": "sums", "noise_multiplier": multiplier}
    )
    place = {"experiment": "0" * 64, "recipient": RECIPIENT}
    found = [Entry.of_sums(privacy, run=f"{task:016x}", task=1, **place) for task in range(tasks)]
    return compose(dict.fromkeys(found, 1), DELTA, "rdp").epsilon


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 9.0])
@pytest.mark.parametrize("tasks", [1, 5])
def test_the_ledger_charges_what_opendp_does(multiplier: float, tasks: int) -> None:
    norm = math.hypot(*BLOCKS)
    one = sum_of_rows(10, norm) >> dp.m.make_gaussian(
        dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float), multiplier * norm
    )
    assert one.map(1) == pytest.approx(1 / (2 * multiplier**2), rel=1e-6), "zCDP of one release"
    theirs = dp.c.make_zCDP_to_approxDP(dp.c.make_composition([one] * tasks)).map(1).epsilon(DELTA)
    ours = charged(multiplier, tasks)
    # two conversions of one Renyi bound: ours knows a fixed set of orders
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours >= exact_epsilon(multiplier / math.sqrt(tasks))


def exact_epsilon(multiplier: float) -> float:
    """Of one Gaussian release at DELTA: Balle and Wang 2018, theorem 8."""
    from scipy.optimize import root_scalar
    from scipy.stats import norm

    def over(epsilon: float) -> float:
        shift = epsilon * multiplier
        return float(
            norm.cdf(0.5 / multiplier - shift)
            - math.exp(epsilon) * norm.cdf(-0.5 / multiplier - shift)
            - DELTA
        )

    return float(root_scalar(over, bracket=(0.0, 100.0)).root)
