"""DP-SGD: per-sample clipping equals the definition, noise once, Poisson batches, no trace left behind."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.errors import PrivacyError
from perennial.foundation.streams import stream
from perennial.privacy import sample_level
from perennial.privacy.config import PrivacyConfig
from perennial.privacy.noise import Noise
from perennial.privacy.sample_level import PrivateGradient, draw_poisson_batches
from tests.seeded_noise import SeededNoise


def network(seed: int = 0) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layers.train()


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.randint(
        0, 10, (count,), generator=generator
    )


def config(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(
        **({"mode": "sample", "sample_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 0.0} | changes)
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def by_definition(model: nn.Module, x: Tensor, y: Tensor, clip_norm: float, expected_batch: float) -> Tensor:
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for i in range(len(x)):
        gradients = torch.autograd.grad(
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )
        vector = torch.cat([g.reshape(-1) for g in gradients])
        total += vector * min(1.0, clip_norm / vector.norm().item())
    return total / expected_batch


@pytest.mark.parametrize("most", [4096, 5, 1])
@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_gradient_equals_the_definition(monkeypatch: pytest.MonkeyPatch, most: int, clip_norm: float) -> None:
    monkeypatch.setattr(sample_level, "BLOCK", most)
    model, (x, y) = network(), samples(12)
    privacy = config(clip_norm=clip_norm)
    with PrivateGradient(model, privacy, 10.0, Noise()) as private:
        loss = private.compute(
            torch.arange(12), lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")
        )
    assert loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert torch.allclose(flat(model), by_definition(model, x, y, clip_norm, 10.0), rtol=1e-4, atol=1e-6)


def test_one_sample_moves_the_sum_by_at_most_the_clip_norm() -> None:
    model, (x, y) = network(), samples(6)
    x[5] *= 1000
    with PrivateGradient(model, config(clip_norm=0.3), 1.0, Noise()) as private:
        sums = []
        for count in (5, 6):
            private.compute(
                torch.arange(count), lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")
            )
            sums.append(flat(model).clone())
    assert (sums[1] - sums[0]).norm().item() <= 0.3 * (1 + 1e-5)


@pytest.mark.parametrize("most", [4096, 2])
@pytest.mark.parametrize(
    "scale", [1e37, float("inf"), float("nan")], ids=["overflows", "infinite", "no number"]
)
def test_a_sample_without_a_finite_gradient_counts_as_zero(
    monkeypatch: pytest.MonkeyPatch, most: int, scale: float
) -> None:
    monkeypatch.setattr(sample_level, "BLOCK", most)
    (x, y), model = samples(6), network()
    with torch.no_grad():
        model[4].weight.mul_(1e3)  # pyright: ignore[reportOperatorIssue, reportCallIssue, reportArgumentType]
    x[3] *= scale
    others = [0, 1, 2, 4, 5]
    privacy = config(clip_norm=0.3)

    def losses(indices: Tensor) -> Tensor:
        return F.cross_entropy(model(x[indices]), y[indices], reduction="none")

    with PrivateGradient(model, privacy, 1.0, Noise()) as private:
        norms = private.measure_clipped_norms(torch.arange(6), losses)
        private.compute(torch.arange(6), losses)
        with_it = flat(model).clone()
        private.compute(torch.arange(5), lambda rows: losses(torch.tensor(others)[rows]))
    assert norms[3] == 0 and (norms[others] > 0).all()
    assert with_it.isfinite().all()
    assert torch.allclose(with_it, flat(model), rtol=1e-4, atol=1e-6)
    with PrivateGradient(model, privacy, 1.0, Noise()) as private:
        private.compute(torch.arange(1), lambda rows: losses(torch.full_like(rows, 3)))
    assert not flat(model).any()


@pytest.mark.parametrize("patients", [None, torch.zeros(1, dtype=torch.int64)], ids=["sample", "patient"])
@pytest.mark.parametrize("value", [1.875, 3e-4])
def test_a_large_layer_of_equal_gradients_moves_the_sum_by_no_more_than_the_clip_norm(
    patients: Tensor | None, value: float
) -> None:
    """Float32 adds a million equal squares to less than there is."""
    model, side = nn.Linear(1024, 1024, bias=False), 1024
    x = torch.full((1, side), value)
    with PrivateGradient(model.train(), config(clip_norm=0.3), 1.0, Noise()) as private:
        private.compute(torch.zeros(1, dtype=torch.int64), lambda rows: model(x[rows]).sum(dim=1), patients)
    moved = flat(model).double().norm().item()
    assert moved <= 0.3
    assert moved == pytest.approx(min(0.3, value * side), rel=1e-5)


def test_a_sample_more_does_not_round_a_large_sum_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the last of 2,000 samples, all alike, moved the sum by 1.000018 clip norms."""
    sums: list[Tensor] = []
    monkeypatch.setattr(sample_level, "add_noise", lambda vector, *_: sums.append(vector.double()))
    model, x = nn.Linear(211, 307, bias=False), torch.full((2000, 211), 0.7)
    for count in (1999, 2000):
        with PrivateGradient(model.train(), config(), 1.0, Noise()) as private:
            private.compute(torch.arange(count), lambda rows: model(x[rows]).sum(dim=1))
    assert (sums[1] - sums[0]).norm() == pytest.approx(1.0, abs=1e-6)


def test_gradients_whose_squares_are_no_float32_numbers_count_as_zero() -> None:
    model = nn.Linear(4, 1, bias=False)
    for size, counts in ((1e18, True), (1e25, False)):
        x = torch.full((1, 4), size)
        with PrivateGradient(model.train(), config(clip_norm=1e-3), 1.0, Noise()) as private:
            private.compute(torch.zeros(1, dtype=torch.int64), lambda rows, x=x: model(x[rows])[:, 0])
        assert (flat(model).double().norm() <= 1e-3) and bool(flat(model).any()) == counts


def test_noise_is_added_once_however_the_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(16)
    gradients = []
    for most in (4096, 3):
        monkeypatch.setattr(sample_level, "BLOCK", most)
        model = network()
        source = SeededNoise(stream(1, "dp-noise"))
        with PrivateGradient(model, config(noise_multiplier=2.0), 16.0, source) as private:
            private.compute(
                torch.arange(16), lambda rows, m=model: F.cross_entropy(m(x[rows]), y[rows], reduction="none")
            )
        gradients.append(flat(model))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


def test_an_empty_batch_is_noise_of_the_stated_size() -> None:
    model = network()
    privacy = config(noise_multiplier=3.0, clip_norm=0.5)
    with PrivateGradient(model, privacy, 8.0, Noise()) as private:
        loss = private.compute(torch.arange(0), lambda rows: torch.empty(0))
    assert math.isnan(loss)
    assert flat(model).std().item() == pytest.approx(3.0 * 0.5 / 8, rel=0.05)


class Gated(nn.Module):
    """Has a part that the loss does not always use, as a gate before the second task."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x))


def test_unused_and_frozen_parameters() -> None:
    model = Gated()
    x, y = torch.rand(5, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 0, 1])
    with PrivateGradient(model, config(), 5.0, Noise()) as private:
        for _ in range(2):
            private.compute(
                torch.arange(5), lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")
            )
    assert model.used.weight.grad is not None
    assert model.used.weight.grad.abs().sum() > 0
    assert model.unused.weight.grad is not None
    assert model.unused.weight.grad.abs().sum() == 0
    assert model.frozen.weight.grad is None


def test_nothing_of_opacus_stays_on_the_model() -> None:
    model, (x, y) = network(), samples(3)
    keys = list(model.state_dict())
    with PrivateGradient(model, config(), 3.0, Noise()) as private:
        private.compute(
            torch.arange(3), lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")
        )
    assert list(model.state_dict()) == keys
    assert all(not vars(parameter) for parameter in model.parameters())
    assert all(not module._forward_hooks and not module._backward_hooks for module in model.modules())
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert flat(model).norm() > 0


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.SyncBatchNorm(8)])
def test_batch_norm_is_refused_with_its_remedy(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sequential(norm))
    with pytest.raises(PrivacyError, match=r"BatchNorm in 1\.0: .*norm: group"):
        PrivateGradient(model, config(), 8.0, Noise())


def test_wrong_uses_are_refused() -> None:
    model, (x, y) = network(), samples(4)
    with pytest.raises(PrivacyError, match="mode is client_local"):
        PrivateGradient(model, config(mode="client_local", sample_rate=None), 4.0, Noise())
    with pytest.raises(PrivacyError, match="expected batch"):
        PrivateGradient(model, config(), 0.0, Noise())
    with PrivateGradient(model, config(), 4.0, Noise()) as private:
        with pytest.raises(PrivacyError, match="one loss for each sample"):
            private.compute(torch.arange(4), lambda rows: F.cross_entropy(model(x[rows]), y[rows]))
        model.eval()
        with pytest.raises(PrivacyError, match="evaluation mode"):
            private.compute(
                torch.arange(4), lambda rows: F.cross_entropy(model(x[rows]), y[rows], reduction="none")
            )


def test_poisson_batches_draw_each_sample_on_its_own() -> None:
    source = SeededNoise(stream(5, "poisson"))
    presence = torch.zeros(400, 200)
    for step, batch in enumerate(draw_poisson_batches(200, 0.05, 400, source)):
        presence[step, batch] = 1
    sizes = presence.sum(dim=1)
    deviation = math.sqrt(200 * 0.05 * 0.95)
    assert sizes.mean().item() == pytest.approx(10, abs=4 * deviation / math.sqrt(400))
    assert sizes.std().item() == pytest.approx(deviation, rel=0.15)
    assert presence.mean(dim=0).max().item() < 0.05 + 5 * math.sqrt(0.05 * 0.95 / 400)


def test_poisson_batches_at_the_ends() -> None:
    source = Noise()
    assert all(len(batch) == 7 for batch in draw_poisson_batches(7, 1.0, 3, source))
    assert [len(batch) for batch in draw_poisson_batches(1, 1e-9, 3, source)] == [0, 0, 0]
    assert [len(batch) for batch in draw_poisson_batches(0, 0.5, 2, source)] == [0, 0]
    for rate in (0.0, 1.1):
        with pytest.raises(PrivacyError):
            next(draw_poisson_batches(5, rate, 1, source))
