"""Noise that sites share: the sampler's distribution, the scale, the cost, and runs with it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.secure_words import UpdateWords
from perennial.engine.run import run_in_process
from perennial.foundation.errors import ConfigError
from perennial.foundation.streams import stream
from perennial.privacy.composition import compose
from perennial.privacy.discrete_gaussian import draw_discrete_gaussian
from perennial.privacy.entries import Entry
from perennial.privacy.noise import Noise
from perennial.privacy.shared_noise import SharedNoise
from perennial.privacy.shared_noise_cost import compute_shared_multiplier, compute_tau
from perennial.server import preflight
from perennial.strategies.fedavg import FedAvg
from tests.seeded_noise import SeededNoise

SMALL: dict[str, Any] = {
    "name": "shared",
    "data": {"source": "digits", "sites": 4, "samples_limit": 200, "partition": {"kind": "iid"}},
    "tasks": {"count": 1, "rounds": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.05}},
    "secure": {"least": 3, "quorum": 4},
    "privacy": {
        "mode": "client_shared",
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "accountant": "rdp",
    },
    "evaluation": {"federated": False},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


@pytest.mark.parametrize("std", [1, 3, 10])
def test_samples_have_the_distribution_of_the_discrete_gaussian(std: int) -> None:
    count = 200_000
    drawn = draw_discrete_gaussian(count, std, SeededNoise(stream(7, "test", std)))
    values, found = np.unique(drawn, return_counts=True)
    density = np.exp(-(np.arange(-40.0 * std, 40 * std + 1) ** 2) / (2 * std * std))
    expected = density[values + 40 * std] / density.sum() * count
    often = expected > 20
    statistic = ((found[often] - expected[often]) ** 2 / expected[often]).sum()
    cells = int(often.sum())
    # 6 deviations of a chi-square with as many degrees of freedom
    assert statistic < cells + 6 * math.sqrt(2 * cells)
    assert often.sum() > 5


def test_cost_beyond_a_gaussian_follows_the_theorem() -> None:
    assert compute_tau(3, 100) < 1e-37
    honest, std = 5, 1
    by_hand = 10 * sum(math.exp(-2 * math.pi**2 * k / (k + 1)) for k in range(1, honest))
    assert compute_tau(std, honest) == pytest.approx(by_hand)
    plain = 1 / 2.0
    cost = min(math.sqrt(plain**2 + by_hand * 100 / 2), plain + by_hand * 10)
    assert 1 / compute_shared_multiplier(2.0, std, honest, values=100) == pytest.approx(cost)
    assert 0.999999999 < compute_shared_multiplier(1.0, 1 << 20, 100) < 1


def test_discrete_releases_compose_by_renyi_orders() -> None:
    def entry(mechanism: Any) -> Entry:
        return Entry(
            run="r", experiment="e", recipient="server", kind="update", unit="site", relation="add_remove",
            mechanism=mechanism, noise_multiplier=2.0, sample_rate=1.0, steps=1,
        )  # fmt: skip

    both = compose([entry("gaussian"), entry("discrete_gaussian")], 1e-5)
    assert both.accountant == "rdp"
    assert both.epsilon == compose([entry("gaussian")] * 2, 1e-5, "rdp").epsilon


def test_rounding_never_makes_a_norm_grow_and_the_sum_comes_back(tmp_path: Path) -> None:
    experiment = load_experiment(Path(write(tmp_path)))
    layout = UpdateWords(experiment, 4)
    assert layout.noise is not None
    update = {"b": torch.randn(50, generator=torch.Generator().manual_seed(1)) / 50, "a": torch.randn(3) / 50}
    words = layout.encode(update, 1)
    total, weight = layout.decode(words, update)
    assert weight == 1
    before = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
    assert math.sqrt(sum(float(t.square().sum()) for t in total.values())) <= before
    for name, tensor in update.items():
        assert float((total[name] - tensor.double()).abs().max()) < layout.noise.step


def test_noise_of_a_site_has_its_share_of_the_variance() -> None:
    noise = SharedNoise(multiplier=2.0, clip_norm=0.5, honest=9, std=1 << 16)
    words = np.zeros(100_001, dtype=np.uint64)
    noise.add(words, Noise())
    values = words[:-1].view(np.int64) * noise.step
    assert abs(values.var() * 9 / (2.0 * 0.5) ** 2 - 1) < 6 * math.sqrt(2 / 100_000)
    assert words[-1] == 0


def test_run_carries_the_noise_of_client_central_at_the_wider_multiplier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares for m = 3 of n = 4 sites, of which all answer, beside a trusted server's noise at multiplier
    sigma sqrt(n/m). Training at a rate of next to nothing leaves the noise of the round alone."""
    found: list[torch.Tensor] = []
    take_sum, noised = FedAvg.take_sum, preflight.copy_with_noise

    def flat(tensors: Any) -> torch.Tensor:
        return torch.cat([tensors[name].reshape(-1).double() for name in sorted(tensors)])

    def opened(strategy: FedAvg, ctx: Any, total: Any, weight: float) -> Any:
        found.append(flat(total))
        return take_sum(strategy, ctx, total, weight)

    def released(arrays: Any, std: float, source: Any) -> Any:
        result = noised(arrays, std, source)
        found.append(4 * (flat(result) - flat(arrays)))
        return result

    monkeypatch.setattr(FedAvg, "take_sum", opened)
    monkeypatch.setattr(preflight, "copy_with_noise", released)
    changes: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [64]},
        "learner": {"preset": "none", "optimizer": {"lr": 1e-9}},
        "tasks": {"count": 1, "rounds": 1},
    }
    shares = SMALL["privacy"] | {"noise_multiplier": 2.0, "clip_norm": 0.5}
    trusted = shares | {"mode": "client_central", "noise_multiplier": 2 * math.sqrt(4 / 3)}
    for name, rest in {
        "shared": {"secure": {"least": 3, "quorum": 3}, "privacy": shares},
        "central": {"secure": None, "privacy": trusted},
    }.items():
        run_in_process(RunSettings(write(tmp_path, name=name, **changes, **rest), runs=str(tmp_path)))
    for noise in found:
        assert abs(float(noise.var()) / ((2 * 0.5) ** 2 * 4 / 3) - 1) < 5 * math.sqrt(2 / len(noise))
    assert len(found) == 2 and len(found[0]) == len(found[1]) > 4_000


def test_run_is_client_central_s_once_both_have_the_same_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping, weights, grid and rounds make no difference: what accuracies differ by is the draw."""
    drawn: list[np.ndarray] = []
    add = SharedNoise.add

    def noted(self: SharedNoise, words: Any, source: Any) -> None:
        before = words.copy()
        add(self, words, source)
        drawn.append((words - before)[:-1].view(np.int64) * self.step)

    def same(arrays: dict[str, torch.Tensor], std: float, source: Any) -> dict[str, torch.Tensor]:
        noise = torch.from_numpy(np.sum([drawn.pop(0) for _ in range(4)], axis=0)) / 4
        names = sorted(arrays)
        parts = noise.split([arrays[name].numel() for name in names])
        return {
            name: (arrays[name] + part.view(arrays[name].shape)).float()
            for name, part in zip(names, parts, strict=True)
        }

    monkeypatch.setattr(SharedNoise, "add", noted)
    monkeypatch.setattr(preflight, "copy_with_noise", same)
    trusted = SMALL["privacy"] | {"mode": "client_central", "noise_multiplier": math.sqrt(4 / 3)}
    run_in_process(RunSettings(write(tmp_path, secure={"least": 3, "quorum": 3}), runs=str(tmp_path / "a")))
    assert len(drawn) == 8
    run_in_process(RunSettings(write(tmp_path, secure=None, privacy=trusted), runs=str(tmp_path / "b")))
    shared, central = (load_file(tmp_path / run / "shared" / "model.safetensors") for run in "ab")
    largest = max(float((shared[name] - central[name]).abs().max()) for name in central)
    assert not drawn and largest < 1e-5 * max(float(tensor.abs().max()) for tensor in central.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secure": None}, "needs `secure` with a quorum"),
        ({"secure": {"least": 3}}, "needs `secure` with a quorum"),
        ({"privacy": SMALL["privacy"] | {"accountant": "prv"}}, "allowed 'rdp'"),
        (
            {
                "secure": {"least": 3, "quorum": 4, "masks": False},
                "privacy": SMALL["privacy"],
            },
            "secure.masks: found false",
        ),
    ],
)
def test_claims_that_would_be_false_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_experiment(Path(write(tmp_path, **changes)))


def test_audit_of_the_sum_stays_below_the_claim_and_notices_missing_noise() -> None:
    """An empirical floor for epsilon from the opened sum of one coordinate: three honest parts, one site's
    contribution there or zero. With one site's part left out the floor passes the claim."""
    trials, delta = 250_000, 1e-2
    noise = SharedNoise(multiplier=1.0, clip_norm=1.0, honest=3, std=1 << 12)
    step = round(noise.clip_norm / noise.step)

    def floor(parts: int) -> float:
        source = Noise()
        totals = [
            draw_discrete_gaussian(parts * trials, noise.std, source).reshape(parts, trials).sum(axis=0)
        ]
        totals.append(
            draw_discrete_gaussian(parts * trials, noise.std, source).reshape(parts, trials).sum(axis=0)
        )
        best = 0.0
        for threshold in np.linspace(0, 3 * step, 40):
            hit, false = (totals[0] + step > threshold).mean(), (totals[1] > threshold).mean()
            # lower and upper ends of 4-deviation intervals
            low = hit - 4 * math.sqrt(hit * (1 - hit) / trials)
            high = false + 4 * math.sqrt(max(false * (1 - false), 1 / trials) / trials)
            if low > delta:
                best = max(best, math.log((low - delta) / high))
        return best

    claim = exact_epsilon(1.0, delta)
    assert floor(3) < claim
    assert floor(2) > claim, "one part left out must be noticed"


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def exact_epsilon(multiplier: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism at delta (Balle and Wang 2018)."""
    low, high = 0.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        a, b = 1 / (2 * multiplier) - middle * multiplier, -1 / (2 * multiplier) - middle * multiplier
        found = _normal(a) - math.exp(middle) * _normal(b)
        low, high = (middle, high) if found > delta else (low, middle)
    return high
