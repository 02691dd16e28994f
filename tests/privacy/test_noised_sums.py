"""One Gaussian release of sums a task: what one sample moves, what is charged, and nothing leaves twice."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from perennial.foundation.errors import ConfigError, PrivacyError
from perennial.learning.analytic.files import read_statistics_file
from perennial.learning.analytic.solve import Sums, ridge
from perennial.learning.analytic.statistics import PRODUCT, Collector, Statistics, unpacked
from perennial.models.feature_maps.ball import GRID, on_grid
from perennial.privacy.composition import compose
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.discrete_gaussian import SeededWords
from perennial.privacy.entries import RECIPIENT, Entry
from perennial.privacy.noised_sums import STEPS, add_noise_to_sums, noise_std, sensitivity
from perennial.strategies.statistics.kept import KeptSums
from tests.strategies.test_analytic_runs import experiment, run

PRIVACY = {"mode": "sample", "release": "sums", "noise_multiplier": 0.5, "noise_source": "seeded"}
NOISED = {
    "privacy": PRIVACY,
    "evaluation": {"federated": False},
    "strategy": {"shrinkage": 1e-6, "standardise": False},
}
PLACE = {"run": "0" * 16, "experiment": "0" * 64, "recipient": RECIPIENT}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERENNIAL_CACHE", str(tmp_path / "cache"))


def collected(features: torch.Tensor, labels: torch.Tensor):
    collector = Collector(features.shape[1], range(3))
    collector.add(features, labels)
    return collector.finish()


class NoNoise:
    """Words under which a draw is never made, for what is rounded alone."""

    def words(self, count: int) -> np.ndarray:
        raise AssertionError("no draw expected")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 40))
def test_one_sample_moves_the_rounded_sums_by_no_more_than_the_sensitivity(
    seed: int, width: int, others: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = on_grid(torch.randn(others + 1, width, generator=generator))
    labels = torch.randint(0, 3, (others + 1,), generator=generator)
    with_it, without = collected(features, labels), collected(features[1:], labels[1:])
    coarse = PRODUCT // STEPS
    difference = [
        (torch.div(with_it.gram, coarse, rounding_mode="floor") / STEPS)
        - (torch.div(without.gram, coarse, rounding_mode="floor") / STEPS),
        (with_it.sums - without.sums) / GRID,
        (with_it.counts - without.counts).double(),
    ]
    matrix = unpacked((difference[0] * PRODUCT).to(torch.int64), width + 1)
    moved = matrix.square().sum() + sum(part.square().sum() for part in difference[1:])
    assert math.sqrt(float(moved)) <= sensitivity(width + 1)
    assert sensitivity(width + 1) == pytest.approx(math.sqrt(3), rel=1e-3)


def test_noise_has_the_promised_deviation_in_each_place() -> None:
    width, multiplier = 60, 2.0
    gram = torch.zeros(width * (width + 1) // 2, dtype=torch.int64)
    sums, counts = torch.zeros(40, width, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    source = SeededWords(np.random.default_rng(0))
    noised, rows, n = add_noise_to_sums(gram, sums, counts, PRODUCT, multiplier, source)
    matrix = unpacked(noised, width)
    above = matrix[torch.triu(torch.ones_like(matrix), 1).bool()]
    std = noise_std(multiplier, width)
    assert float(above.std()) == pytest.approx(std / math.sqrt(2), rel=0.1)
    assert float((rows / GRID).std()) == pytest.approx(std, rel=0.1)
    assert float(matrix.diagonal().std()) == pytest.approx(std, rel=0.3)
    assert float((n / STEPS).std()) == pytest.approx(std, rel=0.4)
    # a finer grid than the noise's would carry the low bits of the sums
    assert not (noised % (PRODUCT // STEPS)).any()


def test_noise_that_the_sampler_cannot_draw_is_refused() -> None:
    nothing = torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1)
    for multiplier in (0.0, 1e6):
        with pytest.raises(PrivacyError, match="allowed above 0"):
            add_noise_to_sums(*nothing, PRODUCT, multiplier, NoNoise())


def test_a_sample_pays_for_the_task_that_it_is_in() -> None:
    privacy = PrivacyConfig.model_validate(PRIVACY | {"noise_multiplier": 2.0, "noise_source": "secure"})
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
    quiet = NOISED | {"privacy": PRIVACY | {"noise_multiplier": 1.0}}
    summary = run(tmp_path, "noised", **quiet)
    alone = compose(
        [Entry.of_sums(PrivacyConfig.model_validate(PRIVACY | {"noise_multiplier": 1.0}), **PLACE, task=1)],
        1e-5,
    )
    assert (
        alone.unprotected == 1
    )  # seeded noise hides nothing, and the figure is what secure noise would cost
    claim = summary["epsilon"]
    assert claim["unit"] == "sample" and set(claim["per_site"]) == {f"site-{k}" for k in range(4)}
    secure = PrivacyConfig.model_validate(PRIVACY | {"noise_multiplier": 1.0, "noise_source": "secure"})
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

    def lose_first(self: KeptSums, task: int, site: str, statistics: Statistics) -> None:
        if len(lost) < 4:
            lost.append(statistics.sha256)
        else:
            add(self, task, site, statistics)

    monkeypatch.setattr(KeptSums, "add", lose_first)
    twice = {"privacy": PRIVACY | {"noise_source": "secure"}, "tasks": {"count": 1, "rounds": 2}}
    run(tmp_path, "lost", **(NOISED | twice))
    folder = tmp_path / "runs" / "lost"
    files = sorted((folder / "statistics").glob("*.safetensors"))
    given = [read_statistics_file(path)[0].sha256 for path in files]
    assert given == lost
    for state in (folder / "sites").glob("site-*"):
        assert (state / "ledger.jsonl").read_text().count('"statistics"') == 1
    kept = list(folder.rglob("statistics-1-*.safetensors"))
    assert len(kept) == 4 and all(path.stat().st_mode & 0o777 == 0o600 for path in kept)


def test_signal_survives_little_noise_and_ridge_survives_much() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 8, generator=generator) * 2
    labels = torch.randint(0, 3, (4000,), generator=generator)
    features = on_grid(centres[labels] + torch.randn(4000, 8, generator=generator))
    sums = collected(features, labels)
    for multiplier, least in ((1.0, 0.9), (100.0, 0.0)):
        source = SeededWords(np.random.default_rng(1))
        gram, rows, counts = add_noise_to_sums(sums.gram, sums.sums, sums.counts, PRODUCT, multiplier, source)
        noised = type(sums)(gram, rows, counts, sums.classes)
        found = Sums.of_noised(noised, noise_std(multiplier, sums.width))
        assert float(torch.linalg.eigvalsh(found.gram).min()) > -1e-6 * float(found.gram.trace())
        head = ridge(found, 1e-6)
        right = float((head.scores(features).argmax(dim=1) == labels).double().mean())
        assert math.isfinite(float(head.weight.sum())) and right >= least


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": {"head": "gaussian"}}, "allowed: ridge"),
        ({"strategy": {"head": "balanced_ridge"}}, "has been worked out"),
        ({"strategy": {"shrinkage": "gcv"}}, "release of their own"),
        (
            {"privacy": {**PRIVACY, "release": "updates", "clip_norm": 1.0, "sample_rate": 0.1}},
            "release sums",
        ),
    ],
)
def test_what_noise_does_not_cover_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    merged = {key: dict(value) for key, value in NOISED.items()}
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
    ):
        with pytest.raises(ValidationError, match=message):
            PrivacyConfig.model_validate(privacy)
    assert experiment()["strategy"]["name"] == "analytic"
