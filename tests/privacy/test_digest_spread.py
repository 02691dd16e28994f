"""Digests spread apart again have the mean and the variance of the samples that they were mixed from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.privacy.config import DigestConfig
from perennial.privacy.digests import mix
from perennial.strategies.digest_synthesis.store import spread, spread_factor

EXPERIMENT: dict[str, Any] = {
    "name": "spread",
    "data": {"source": "digits", "sites": 2, "samples_limit": 120, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "digest_two_branch", "backbone": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "strategy": {"name": "digest_synthesis", "base": "fedavg", "spread": True},
    "digests": {"per_digest": 2, "mix": "within_class"},
    "rounds": {"deadline": 5},
    "evaluation": {"federated": False},
}


def samples(classes: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of which each class has a mean of its own and variance 1, all well above 0."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(classes).repeat_interleave(each)
    return 20 + 5 * labels[:, None] + torch.randn(len(labels), 6, generator=generator), labels


def test_mean_and_variance_of_the_samples_come_back() -> None:
    config = DigestConfig(mix="within_class", per_digest=4)
    features, labels = samples(2, 4000)
    mixed = mix(features, labels, 2, config, stream(1, "groups"))
    apart = spread(mixed.features, mixed.labels, spread_factor(config))
    for label in range(2):
        rows = mixed.labels[:, label] > 0.999
        assert mixed.features[rows].var(dim=0).mean() < 0.7
        assert apart[rows].var(dim=0).mean() == pytest.approx(1.0, rel=0.06)
        assert torch.allclose(apart[rows].mean(dim=0), mixed.features[rows].mean(dim=0), atol=1e-3)


def test_one_sample_in_a_digest_and_digests_of_several_classes_stay_where_they_are() -> None:
    single = DigestConfig(per_digest=1)
    features, labels = samples(3, 8)
    alone = mix(features, labels, 3, single, stream(1, "groups"))
    assert torch.equal(spread(alone.features, alone.labels, spread_factor(single)), alone.features)
    mixed = mix(features, labels, 3, DigestConfig(), stream(1, "groups"))
    several = mixed.labels.max(dim=1).values < 1
    assert several.any()
    moved = spread(mixed.features, mixed.labels, 2.0)
    assert torch.equal(moved[several], mixed.features[several])


def test_features_do_not_fall_below_0() -> None:
    features = torch.tensor([[0.0, 1.0], [0.2, 1.0], [2.8, 1.0]])
    apart = spread(features, torch.tensor([[1.0, 0.0]] * 3), 2.0)
    assert torch.allclose(apart, torch.tensor([[0.0, 1.0], [0.0, 1.0], [4.6, 1.0]]))


def run(folder: Path, runs: str, **changes: Any) -> dict[str, Any]:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    return run_in_process(RunSettings(str(path), runs=str(folder / runs)))


def test_a_run_trains_on_digests_that_were_spread(tmp_path: Path) -> None:
    together = {**EXPERIMENT["strategy"], "spread": False}
    apart = run(tmp_path, "apart")
    assert run(tmp_path, "together", strategy=together)["model_sha256"] != apart["model_sha256"]
    noised = {**EXPERIMENT["digests"], "protection": "laplace", "epsilon": 8.0, "largest": 1.0}
    with pytest.raises(ConfigError, match=r"strategy\.spread"):
        run(tmp_path, "noised", digests=noised)


def test_a_digest_that_is_alone_in_its_class_stays_where_it_is() -> None:
    features = torch.tensor([[4.0, 2.0], [1.0, 1.0], [3.0, 5.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    found = spread(features, labels, 2.0)
    assert found.tolist() == [[4.0, 2.0], [0.0, 0.0], [4.0, 7.0]]
