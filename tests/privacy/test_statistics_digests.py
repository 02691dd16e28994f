"""Digests drawn from noised sums: what they are like, what one sample can change, what they cost."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from perennial.client.policy import check_digests
from perennial.config.experiment import load_experiment
from perennial.config.site import SitePolicy
from perennial.engine.run import run_in_process
from perennial.foundation.errors import PrivacyError
from perennial.privacy.calibration import gaussian_multiplier
from perennial.privacy.config import UNWEIGHTED
from perennial.privacy.digest_config import DigestConfig
from perennial.privacy.digests import digest_entries
from perennial.privacy.discrete_gaussian import SeededWords
from perennial.privacy.noised_sums import replacement, sensitivity
from perennial.privacy.statistics_digests import LONGEST, drawn_digests, drawn_guarantee
from tests.strategies.test_digest_rounds import EXPERIMENT, settings

KEYS: dict[str, Any] = {"kind": "statistics", "per_digest": 1, "protection": "gauss", "norm": 4.0}
LENGTH = 6


def config(epsilon: float = 8.0, **changes: Any) -> DigestConfig:
    return DigestConfig.model_validate(KEYS | {"epsilon": epsilon} | changes)


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes 2 and 3, 0 or more, of length 4 at most."""
    generator = torch.Generator().manual_seed(1)
    labels = 2 + (torch.arange(count) % 3 == 0).long()
    means = 1 + torch.nn.functional.one_hot(labels - 2, LENGTH).float()
    return (means + torch.randn(count, LENGTH, generator=generator) / 5).clamp(min=0), labels


def drawn(features: torch.Tensor, labels: torch.Tensor, settings: DigestConfig, seed: int = 0) -> Any:
    generators = (np.random.default_rng(seed + number) for number in (0, 1))
    drawing, noise = next(generators), SeededWords(next(generators))
    return drawn_digests(features, labels, range(2, 4), settings, drawing, noise)


def test_they_are_like_the_samples_but_none_of_them() -> None:
    features, labels = samples(6000)
    digests, guarantee = drawn(features, labels, config())
    found = digests.labels.argmax(dim=1)
    assert digests.labels.shape == (len(digests.features), 4) and set(found.tolist()) == {2, 3}
    for label in (2, 3):
        assert int((found == label).sum()) == pytest.approx(int((labels == label).sum()), abs=15)
        ours, theirs = digests.features[found == label], features[labels == label]
        assert torch.allclose(ours.mean(dim=0), theirs.mean(dim=0), atol=0.03)
        assert torch.allclose(ours.std(dim=0), theirs.std(dim=0), atol=0.05)
    assert bool((digests.features >= 0).all())
    assert float(torch.cdist(digests.features[:200], features).min()) > 0
    assert (guarantee.epsilon, guarantee.label_epsilon, guarantee.delta) == (8.0, 8.0, 1e-5)
    assert digests.groups.numel() == 0


def test_the_shape_of_features_is_kept() -> None:
    features, labels = samples(600)
    digests, _ = drawn(features.view(-1, 2, 3), labels, config())
    assert digests.features.shape[1:] == (2, 3)


def test_noise_covers_what_replacing_one_sample_moves() -> None:
    generator = torch.Generator().manual_seed(4)
    worst = 0.0
    for _ in range(200):
        pair = torch.randn(2, LENGTH, generator=generator).abs().double()
        a, b = pair / pair.norm(dim=1, keepdim=True)
        products = float((torch.outer(a, a) - torch.outer(b, b)).square().sum())
        other_class = products + 2 + 2
        same_class = products + float((a - b).square().sum())
        worst = max(worst, other_class, same_class)
    axes = torch.eye(LENGTH).double()
    worst = max(
        worst, float((torch.outer(axes[0], axes[0]) - torch.outer(axes[1], axes[1])).square().sum()) + 4
    )
    assert worst == pytest.approx(6, rel=1e-9)
    assert math.sqrt(worst) <= replacement(LENGTH, UNWEIGHTED, signed=False)
    guarantee = drawn_guarantee(config(2.0), LENGTH)
    std = guarantee.scale * sensitivity(LENGTH, UNWEIGHTED)
    assert std >= gaussian_multiplier(2.0, 1e-5) * math.sqrt(worst)
    assert guarantee.scale == pytest.approx(math.sqrt(2) * gaussian_multiplier(2.0, 1e-5), rel=1e-3)


def test_more_noise_is_further_from_the_samples() -> None:
    features, labels = samples(600)
    distances = []
    for epsilon in (0.5, 8.0):
        digests, _ = drawn(features, labels, config(epsilon))
        of_two = digests.features[digests.labels.argmax(dim=1) == 2]
        distances.append(float((of_two.mean(dim=0) - features[labels == 2].mean(dim=0)).norm()))
    assert distances[0] > 2 * distances[1]


def test_what_cannot_be_drawn_is_named() -> None:
    features, labels = samples(9)
    with pytest.raises(PrivacyError, match="leaves none of this site's 2 classes sure"):
        drawn(features, labels, config(0.1))
    with pytest.raises(PrivacyError, match=f"have {LONGEST + 1} numbers; allowed up to {LONGEST}"):
        drawn_guarantee(config(), LONGEST + 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protection": "none", "norm": None, "epsilon": None}, "found protection 'none'; allowed gauss"),
        ({"per_digest": 4}, "draws single samples"),
        ({"labels": "randomised", "label_epsilon": 1.0}, "draws single samples"),
    ],
    ids=["no noise", "mixtures", "labels of their own"],
)
def test_settings_of_mixtures_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**changes)


def test_an_absent_site_teaches_on_by_them(tmp_path: Path) -> None:
    away = {
        "tasks": {"count": 1, "rounds": 3},
        "absence": [{"site": "site-1", "first_round": 2}],
        "digests": KEYS | {"epsilon": 20.0, "noise_source": "seeded"},
    }
    ran = settings(tmp_path, **away)
    summary = run_in_process(ran)
    block: Any = summary["digest"]
    assert block["kind"] == "statistics" and block["epsilon_of_one_label"] == 20.0
    assert block["sites"]["site-1"]["rounds_stood_in"] == 2
    experiment = load_experiment(tmp_path / "experiment.yaml")
    assert experiment.digests is not None
    (entry,) = digest_entries(experiment.digests, drawn_guarantee(experiment.digests, LENGTH), "r", "e", "s")
    assert (entry.mechanism, entry.note) == ("gaussian", "")
    wary = SitePolicy.model_validate(
        {"answers": ["train", "digest"], "require_privacy": "sample", "max_epsilon": 30}
    )
    secure = experiment.digests.model_copy(update={"noise_source": "secure"})
    check_digests(wary, experiment, secure)
    assert EXPERIMENT["digests"] == {"per_digest": 2}
