"""One Gaussian release of sums a task: what one sample moves, what is charged, and nothing leaves twice."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from perennial.foundation.errors import ConfigError, DataError, PrivacyError
from perennial.learning.analytic.noised import NoisedSums, solve_noised_gaussian
from perennial.learning.analytic.solve import solve_ridge
from perennial.learning.analytic.statistics import (
    PRODUCT,
    Collector,
    Statistics,
    read_statistics_file,
    unpack_triangle,
)
from perennial.models.feature_maps.projection import GRID, RADIUS_SQUARED, round_to_grid, shrink_to_radius
from perennial.privacy.composition import compose
from perennial.privacy.config import BLOCKS, Blocks, PrivacyConfig
from perennial.privacy.entries import RECIPIENT, Entry
from perennial.privacy.noise import Noise
from perennial.privacy.noised_sums import (
    STEPS,
    SumsNoise,
    add_noise_to_sums,
    compute_sensitivity,
)
from perennial.strategies.analytic.kept import KeptSums
from tests.seeded_noise import SeededNoise
from tests.strategies.test_analytic_runs import experiment, run

PRIVACY = {"mode": "sample", "release": "sums", "noise_multiplier": 0.5}
NOISED = {
    "privacy": PRIVACY,
    "evaluation": {"federated": False},
    "strategy": {"head": "ridge", "shrinkage": 1e-6, "standardise": False},
}
PLACE = {"run": "0" * 16, "experiment": "0" * 64, "recipient": RECIPIENT}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def collected(features: torch.Tensor, labels: torch.Tensor) -> Statistics:
    collector = Collector(features.shape[1], range(3), constant=False)
    collector.add(features, labels)
    return collector.finish()


class NoNoise(Noise):
    """Words under which a draw is never made, for what is rounded alone."""

    def words(self, count: int) -> np.ndarray:
        raise AssertionError("no draw expected")


def moved(before: Statistics, after: Statistics, blocks: Blocks) -> float:
    """L2 distance of two sites' weighted sums as they are before noise, features in units of their radius."""
    coarse = PRODUCT // STEPS * RADIUS_SQUARED
    gram = [
        torch.div(part.gram, int(coarse), rounding_mode="trunc") * int(coarse) for part in (before, after)
    ]
    matrix = unpack_triangle(gram[1] - gram[0], before.width) / RADIUS_SQUARED
    sums = (after.sums - before.sums) / GRID / math.sqrt(RADIUS_SQUARED)
    counts = (after.counts - before.counts).double()
    parts = zip(blocks, (matrix, sums, counts), strict=True)
    return math.sqrt(sum(weight**2 * float(part.square().sum()) for weight, part in parts))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 40), st.sampled_from([BLOCKS, (0.0, 1.0, 0.2)])
)
def test_one_sample_moves_the_rounded_sums_by_no_more_than_the_sensitivity(
    seed: int, width: int, others: int, blocks: Blocks
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = round_to_grid(torch.randn(others + 1, width, generator=generator))
    labels = torch.randint(0, 3, (others + 1,), generator=generator)
    with_it, without = collected(features, labels), collected(features[1:], labels[1:])
    found = moved(without, with_it, blocks)
    assert 0.98 * compute_sensitivity(width, blocks) <= found <= compute_sensitivity(width, blocks)


def test_a_row_that_rounding_left_too_long_is_shortened() -> None:
    """The nearest multiples of 2^-16 around length 1/sqrt(2), one step beyond it."""
    steps = [45_875, 6_554, 46_341]
    row = torch.tensor([[steps[0], steps[1]], [steps[2], 0]]).double() / GRID
    assert float(row.square().sum(dim=1).max()) > RADIUS_SQUARED
    shortened = shrink_to_radius(row)
    assert float(shortened.square().sum(dim=1).max()) <= RADIUS_SQUARED
    assert torch.equal(shortened * GRID, (shortened * GRID).trunc())
    assert float((shortened - row).abs().max()) < 2**-13
    with pytest.raises(DataError, match="1/sqrt"):
        shrink_to_radius(2 * row)


@pytest.mark.parametrize("blocks", [BLOCKS, (0.0, 1.0, 0.2), (1.0, 1.0, 1.0)])
def test_noise_has_the_promised_deviation_in_each_place(blocks: Blocks) -> None:
    width, multiplier, released = 60, 2.0, blocks[0] > 0
    gram = torch.zeros(width * (width + 1) // 2, dtype=torch.int64)
    sums, counts = torch.zeros(40, width, dtype=torch.int64), torch.zeros(400, dtype=torch.int64)
    source = SeededNoise(np.random.default_rng(0))
    noised, rows, n = add_noise_to_sums(
        gram, sums, counts, multiplier, source, blocks=blocks, radius_squared=RADIUS_SQUARED
    )
    std = SumsNoise.of(multiplier, width, blocks, RADIUS_SQUARED)
    # the weighted blocks, features in units of their radius, all have the same noise
    assert std.sums == pytest.approx(
        multiplier * compute_sensitivity(width, blocks) / blocks[1] * math.sqrt(0.5)
    )
    assert float((rows / GRID).std()) == pytest.approx(std.sums, rel=0.1)
    assert float((n / STEPS).std()) == pytest.approx(std.counts, rel=0.1)
    assert std.counts * blocks[2] == pytest.approx(std.sums / math.sqrt(0.5) * blocks[1])
    assert len(noised) == (len(gram) if released else 0)
    if released:
        matrix = unpack_triangle(noised, width)
        above = matrix[torch.triu(torch.ones_like(matrix), 1).bool()]
        assert std.gram * blocks[0] == pytest.approx(0.5 * std.counts * blocks[2])
        assert float(above.std()) == pytest.approx(std.gram / math.sqrt(2), rel=0.1)
        assert float(matrix.diagonal().std()) == pytest.approx(std.gram, rel=0.3)
        # a finer grid than the noise's would carry the low bits of the sums
        assert not (noised % (PRODUCT // STEPS // 2)).any()


def test_noise_that_the_sampler_cannot_draw_is_refused() -> None:
    nothing = torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1)
    for multiplier in (0.0, 1e6):
        with pytest.raises(PrivacyError, match="allowed above 0 and up to"):
            add_noise_to_sums(*nothing, multiplier, NoNoise())


def test_a_sample_pays_for_the_task_that_it_is_in() -> None:
    privacy = PrivacyConfig.model_validate(PRIVACY | {"noise_multiplier": 2.0})
    tasks = [Entry.of_sums(privacy, **PLACE, task=task) for task in range(1, 6)]
    once = compose(tasks[:1], 1e-5).epsilon
    assert compose(tasks, 1e-5).epsilon == once
    # asked twice with fresh noise, or in another run, it pays twice
    assert compose([*tasks, tasks[0]], 1e-5).epsilon > 1.3 * once
    other = Entry.of_sums(privacy, **(PLACE | {"run": "1" * 16}), task=4)
    assert compose([*tasks, other], 1e-5).epsilon == compose([*tasks, tasks[0]], 1e-5).epsilon
    # a site is in all parts
    in_clear = PrivacyConfig()
    assert math.isinf(compose([Entry.of_sums(in_clear, **PLACE, task=1)], 1e-5).epsilon)


def test_entries_with_parts_survive_the_ledger_file() -> None:
    privacy = PrivacyConfig.model_validate(PRIVACY)
    entry = Entry.of_sums(privacy, **PLACE, task=3)
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    assert entry.part == "0" * 32 + "." + "0" * 16 + "/task 3"


def test_a_run_with_noise_is_charged_once_for_each_sample(tmp_path: Path) -> None:
    quiet: Any = NOISED | {"privacy": PRIVACY | {"noise_multiplier": 1.0}}
    summary = run(tmp_path, "noised", **quiet)
    claim = summary["epsilon"]
    assert claim["unit"] == "sample" and set(claim["per_site"]) == {f"site-{k}" for k in range(4)}
    secure = PrivacyConfig.model_validate(PRIVACY | {"noise_multiplier": 1.0})
    expected = compose([Entry.of_sums(secure, **PLACE, task=1)], 1e-5).epsilon
    assert claim["value"] == pytest.approx(expected)
    assert summary["analytic"]["samples"] is None
    for state in (tmp_path / "runs" / "noised" / "sites").glob("site-*"):
        lines = (state / "ledger.jsonl").read_text().splitlines()
        parts = [json.loads(line)["part"].rpartition("/") for line in lines if '"statistics"' in line]
        assert [name for _, _, name in parts] == [f"task {task}" for task in range(1, 6)]
        assert len({scope for scope, _, _ in parts}) == 1


def test_what_left_with_noise_is_sent_again_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round's replies are lost at the server; secure noise would not come out the same twice."""
    add, lost = KeptSums.add, []

    def lose_first(self: KeptSums, task: int, site: str, statistics: Statistics, *said: Any) -> None:
        if len(lost) < 4:
            lost.append(statistics.sha256)
        else:
            add(self, task, site, statistics, *said)

    monkeypatch.setattr(KeptSums, "add", lose_first)
    twice = {"privacy": PRIVACY, "tasks": {"count": 1, "rounds": 2}}
    run(tmp_path, "lost", **(NOISED | twice))
    folder = tmp_path / "runs" / "lost"
    files = sorted((folder / "statistics").glob("*.safetensors"))
    given = [read_statistics_file(path)[0].sha256 for path in files]
    assert given == lost
    for state in (folder / "sites").glob("site-*"):
        assert (state / "ledger.jsonl").read_text().count('"statistics"') == 1
    kept = list(folder.rglob("statistics-1-*.safetensors"))
    assert len(kept) == 4 and all(path.stat().st_mode & 0o777 == 0o600 for path in kept)


def noised(sums: Statistics, multiplier: float, seed: int = 1, blocks: Blocks = BLOCKS) -> NoisedSums:
    """The sums of one site after one release."""
    source = SeededNoise(np.random.default_rng(seed))
    parts = add_noise_to_sums(
        sums.gram, sums.sums, sums.counts, multiplier, source, blocks=blocks, radius_squared=RADIUS_SQUARED
    )
    std = SumsNoise.of(multiplier, sums.width, blocks, RADIUS_SQUARED)
    each = torch.ones(len(sums.counts), dtype=torch.float64)
    gram_noise = std.gram if blocks[0] else 0.0
    return NoisedSums.of(Statistics(*parts, sums.classes), gram_noise, std.sums * each, std.counts * each)


def three_classes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 8, generator=generator) * 2
    labels = torch.randint(0, 3, (count,), generator=generator)
    return round_to_grid(centres[labels] + torch.randn(count, 8, generator=generator)), labels


@pytest.mark.parametrize(("multiplier", "least"), [(1.0, 0.9), (4.0, 0.9), (30.0, 0.4)])
def test_heads_survive_noise(multiplier: float, least: float) -> None:
    features, labels = three_classes(4000)
    found = noised(collected(features, labels), multiplier)
    products = found.prepare_for_ridge()
    assert float(torch.linalg.eigvalsh(products.gram).min()) > -1e-6 * float(products.gram.trace())
    for head in (solve_noised_gaussian(found), solve_ridge(products, 1e-6)):
        right = float((head.scores(features).argmax(dim=1) == labels).double().mean())
        assert math.isfinite(float(head.weight.sum())) and right >= least


def test_the_head_of_sums_without_noise_is_the_shrunk_gaussian_one() -> None:
    """With next to no noise nothing is drawn together, and the covariance has a tenth of its mean added."""
    features, labels = three_classes(600)
    sums = collected(features, labels)
    found = noised(sums, 1e-4)
    counts = found.estimate_counts()
    assert torch.allclose(counts, sums.counts.double(), rtol=1e-4)
    means = sums.sums.double() / GRID / sums.counts[:, None]
    assert torch.allclose(found.estimate_means(counts), means, atol=1e-3)
    rows = features.double() - means[labels]
    covariance = rows.T @ rows / len(rows)
    covariance += 0.1 * covariance.trace() / 8 * torch.eye(8)
    assert torch.allclose(found.estimate_covariance(counts, means), covariance, atol=1e-4)
    head = solve_noised_gaussian(found)
    weight = torch.linalg.solve(covariance, means.T).T
    assert torch.allclose(head.weight, weight, rtol=0.02, atol=0.02)
    assert torch.allclose(head.bias, -(means * weight).sum(dim=1) / 2, rtol=0.02, atol=0.02)


def test_what_noise_explains_is_drawn_towards_the_mean() -> None:
    """Hand case, noise 1 on counts and sums: 4 and 0 samples, sums (4, 0) and (0, 0), of two features."""
    one = torch.ones(2, dtype=torch.float64)
    sums = NoisedSums(
        None, torch.tensor([[4.0, 0], [0, 0]]).double(), torch.tensor([4.0, 0]).double(), 0, one, one
    )
    # spread 4 - 1 = 3: three quarters of the way from the mean 2, and at least min(2, 2)
    counts = sums.estimate_counts()
    assert counts.tolist() == [3.5, 2.0]
    # centre 4 / 5.5; apart (4 / 3.5 - centre, 0) and (-centre, 0); what noise explains is 2 / 12.25 and 2 / 4
    centre = 4 / 5.5
    apart = 4 / 3.5 - centre
    first = centre + (1 - 2 / 12.25 / apart**2) * apart
    second = centre - (1 - 0.5 / centre**2) * centre
    found = sums.estimate_means(counts)
    assert torch.allclose(found, torch.tensor([[first, 0.0], [second, 0.0]], dtype=torch.float64))
    assert sums.uncertain.tolist() == [False, True]
    # means alone: the nearest one
    head = solve_noised_gaussian(sums)
    middle = torch.tensor([[(first + second) / 2, 5.0]])
    assert float(head.scores(middle).diff().abs()) < 1e-6


def test_a_class_of_which_nothing_was_released_is_never_predicted() -> None:
    features, labels = three_classes(900)
    found = noised(collected(features, labels), 1.0)
    there = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    part = replace(
        found,
        sums=found.sums * there[:, None],
        counts=found.counts * there,
        sums_noise=found.sums_noise * there,
        counts_noise=found.counts_noise * there,
    )
    assert not (solve_noised_gaussian(part).scores(features).argmax(dim=1) == 1).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": {"head": "gaussian", "shrinkage": 0.1}}, "size of the noise decides"),
        ({"privacy": PRIVACY | {"blocks": [0, 1, 0.2]}}, "blocks begins with 0"),
        ({"strategy": {"head": "balanced_ridge"}}, "has been worked out"),
        ({"strategy": {"shrinkage": "gcv"}}, "allowed: a number"),
        (
            {"privacy": {**PRIVACY, "release": "updates", "clip_norm": 1.0, "sample_rate": 0.1}},
            "release sums",
        ),
    ],
)
def test_what_noise_does_not_cover_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    merged: Any = {key: dict(value) for key, value in NOISED.items()}
    for key, value in changes.items():
        merged[key] = merged.get(key, {}) | value
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "refused", **merged)


def test_settings_of_noised_sums_are_checked() -> None:
    for privacy, message in (
        (
            {"mode": "client_local", "release": "sums", "noise_multiplier": 1.0},
            "allowed with modes sample and sample_shared",
        ),
        (PRIVACY | {"clip_norm": 1.0}, "leave it out"),
        (PRIVACY | {"sample_rate": 0.1}, "leave it out"),
        ({"mode": "sample", "release": "sums"}, "noise_multiplier is missing"),
        (PRIVACY | {"blocks": [0.5, 0, 0.2]}, "(?s)blocks.*greater than 0"),
        (
            {"mode": "client_local", "noise_multiplier": 1.0, "clip_norm": 1.0, "blocks": [1, 1, 1]},
            "release: sums",
        ),
    ):
        with pytest.raises(ValidationError, match=message):
            PrivacyConfig.model_validate(privacy)
    assert experiment()["strategy"]["name"] == "analytic"
