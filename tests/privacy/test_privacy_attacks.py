"""The attacks succeed on what leaves in the clear, so their failure on protected releases means something."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.streams import stream
from perennial.privacy.attacks import (
    infer_labels,
    invert_gradient,
    measure_similarity,
    measure_strength,
    run_likelihood_ratio,
    run_loss_threshold,
)
from perennial.privacy.protection import protect_update
from tests.seeded_noise import SeededNoise

VICTIMS = (0, 3)


class SmallCnn(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(512, 10)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                bound = 1 / math.sqrt(parameter[0].numel())
                parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(
        zip(names, torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())), strict=True)
    )


class TestSimilarity:
    def test_equal_images_and_negatives(self, digits: tuple[Tensor, Tensor]) -> None:
        images = digits[0][:5]
        assert measure_similarity(images, images).tolist() == pytest.approx([1.0] * 5, abs=1e-6)
        assert measure_similarity(images, 1 - images).max().item() < 0

    def test_different_shapes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="expected equal"):
            measure_similarity(torch.zeros(1, 1, 8, 8), torch.zeros(2, 1, 8, 8))


class TestGradientInversion:
    def test_labels_of_a_batch(self, digits: tuple[Tensor, Tensor]) -> None:
        x, y = digits
        model = SmallCnn()
        for index in range(20):
            gradient = gradient_of(model, x[index : index + 1], y[index : index + 1])
            assert infer_labels(gradient["head.weight"], 1).item() == y[index].item()
        gradient = gradient_of(model, x[[0, 3, 5]], y[[0, 3, 5]])
        assert set(infer_labels(gradient["head.weight"], 3).tolist()) == {0, 3, 5}

    def test_a_single_samples_gradient_gives_the_image_back(self, digits: tuple[Tensor, Tensor]) -> None:
        found = [self.attack(digits, victim, noise_multiplier=None) for victim in VICTIMS]
        assert np.mean([similarity for similarity, _ in found]) > 0.8
        assert all(right for _, right in found)

    def test_a_clipped_and_noised_one_does_not(self, digits: tuple[Tensor, Tensor]) -> None:
        found = [self.attack(digits, victim, noise_multiplier=1.0) for victim in VICTIMS]
        assert np.mean([similarity for similarity, _ in found]) < 0.2

    def test_clipping_alone_protects_nothing(self, digits: tuple[Tensor, Tensor]) -> None:
        assert self.attack(digits, VICTIMS[0], noise_multiplier=0.0)[0] > 0.8

    def attack(
        self, digits: tuple[Tensor, Tensor], victim: int, noise_multiplier: float | None
    ) -> tuple[float, bool]:
        x, y = digits[0][victim : victim + 1], digits[1][victim : victim + 1]
        model = SmallCnn()
        gradient = gradient_of(model, x, y)
        if noise_multiplier is not None:
            vector = torch.cat([part.reshape(-1) for part in gradient.values()])
            protect_update(vector, 1.0, noise_multiplier, SeededNoise(stream(victim, "dp-noise")))
            parts = vector.split([part.numel() for part in gradient.values()])
            gradient = {
                name: part.view_as(old) for (name, old), part in zip(gradient.items(), parts, strict=True)
            }
        generator = torch.Generator().manual_seed(victim)
        inversion = invert_gradient(model, gradient, (1, 8, 8), generator, steps=150)
        return measure_similarity(inversion.images, x).item(), bool((inversion.labels == y).all())


class TestMembership:
    def test_guessing_and_certainty(self) -> None:
        draws = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
        guessing = measure_strength(draws[0], draws[1])
        assert guessing.auc == pytest.approx(0.5, abs=0.03)
        assert guessing.tpr_at_1_percent_fpr < 0.03
        sure = measure_strength(draws[0] + 100, draws[1])
        assert (sure.auc, sure.tpr_at_1_percent_fpr) == (1.0, 1.0)

    def test_by_hand(self) -> None:
        """Of 3 x 2 pairs the member is above in 4 and equal in 1; one of three is above all non-members."""
        found = measure_strength(torch.tensor([3.0, 2.0, 0.5]), torch.tensor([2.0, 1.0]))
        assert found.auc == pytest.approx((2 + 1.5 + 0) / 6)
        assert found.tpr_at_1_percent_fpr == pytest.approx(1 / 3)

    def test_an_overfitted_model_gives_its_members_away(self, digits: tuple[Tensor, Tensor]) -> None:
        x, y = digits[0].flatten(1), digits[1]
        order = torch.from_numpy(stream(6, "split").permutation(len(x)))
        members, others, reference = order[:60], order[60:460], order[460:1460]
        noisy = y.clone()
        noisy[members[:20]] = (y[members[:20]] + 1) % 10
        model = nn.Linear(64, 10)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            F.cross_entropy(model(x[members]), noisy[members]).backward()
            optimizer.step()

        def answers(of: Tensor) -> tuple[Tensor, Tensor]:
            return model(x[of]).detach(), noisy[of]

        def losses(of: Tensor) -> Tensor:
            logits, labels = answers(of)
            return F.cross_entropy(logits, labels, reduction="none")

        by_loss = run_loss_threshold(losses(members), losses(others))
        by_ratio = run_likelihood_ratio(answers(members), answers(others), answers(reference))
        assert by_loss.auc > 0.65
        assert by_ratio.auc > 0.65
        split = len(others) // 2
        nothing = run_likelihood_ratio(answers(others[:split]), answers(others[split:]), answers(reference))
        assert nothing.auc == pytest.approx(0.5, abs=0.1)

    def test_the_ratio_beats_the_loss_where_classes_differ(self) -> None:
        """Class 0 is easy, class 1 hard: a member of class 1 has a larger loss than any non-member of class
        0."""
        generator = torch.Generator().manual_seed(5)

        def answers(shift: float) -> tuple[Tensor, Tensor]:
            labels = torch.arange(2000) % 2
            margin = torch.where(labels == 0, 8.0, 0.0) + shift + torch.randn(2000, generator=generator)
            logits = torch.zeros(2000, 2)
            logits[torch.arange(2000), labels] = margin
            return logits, labels

        members, others, reference = answers(3.0), answers(0.0), answers(0.0)
        plain = run_loss_threshold(
            F.cross_entropy(*members, reduction="none"), F.cross_entropy(*others, reduction="none")
        )
        ratio = run_likelihood_ratio(members, others, reference)
        assert ratio.auc > 0.95
        assert ratio.tpr_at_1_percent_fpr > plain.tpr_at_1_percent_fpr + 0.2
