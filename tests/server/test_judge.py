"""The judge of models: a fixed draw of the test samples of the classes seen so far."""

import numpy as np
import pytest
import torch

from perennial.foundation.errors import ConfigError
from perennial.learning.batches import TrainingSet
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.server.evaluation import Judge
from perennial.strategies.valuation.alignment import alignment


def test_a_model_is_judged_on_the_same_samples_of_seen_classes_only() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 3
    test = TrainingSet(x, y, torch.zeros(5), torch.ones(5))
    model = build_model(ModelConfig.model_validate({"name": "mlp", "hidden": [8]}), (5,), 2, seed=1).eval()
    whole = Judge(test, num_classes=2, samples=1000, seed=4)
    logits = model(x[y < 2]).detach()
    scores = whole(model)
    assert scores.labels.tolist() == y[y < 2].tolist()
    assert scores.right.tolist() == (logits.argmax(dim=1) == y[y < 2]).tolist()
    likelihood = torch.nn.functional.cross_entropy(logits, y[y < 2], reduction="none").neg().exp()
    assert torch.allclose(torch.from_numpy(scores.probability).float(), likelihood)
    part = [Judge(test, num_classes=2, samples=10, seed=4)(model) for _ in range(2)]
    assert part[0].probability.tolist() == part[1].probability.tolist()
    assert np.bincount(part[0].labels).tolist() == [5, 5], "as many of each class as of the others"
    # a rare class is there with all that there is of it
    rare = TrainingSet(x, (torch.arange(60) >= 3).long(), test.mean, test.std)
    assert np.bincount(Judge(rare, num_classes=2, samples=10, seed=4)(model).labels).tolist() == [3, 7]


def test_the_descent_of_a_site_s_classes_is_minus_the_gradient_of_their_weighted_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.arange(40) % 4
    test = TrainingSet(x, y, torch.zeros(5), torch.ones(5))
    model = build_model(ModelConfig.model_validate({"name": "mlp", "hidden": [8]}), (5,), 3, seed=1).eval()
    judge = Judge(test, num_classes=3, samples=1000, seed=4)
    with torch.no_grad():
        found = judge.descent(model, [3, 0, 1, 5])
    # classes that are not seen yet and counts that are withheld do not count
    assert judge.descent(model, [3, None, 1]).keys() == found.keys()
    cross_entropy = torch.nn.functional.cross_entropy
    loss = (3 * cross_entropy(model(x[y == 0]), y[y == 0]) + cross_entropy(model(x[y == 2]), y[y == 2])) / 4
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], -parameter.grad)
    assert judge.descent(model, [0, None, 0]) == {}
    assert judge.descent(model, []) == {}


def test_an_update_is_aligned_with_the_way_down() -> None:
    way = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    update = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[2.0]]), "buffer": torch.tensor([9.0])}
    assert alignment(update, way) == pytest.approx(2.0 * 4.0 / (5.0 * 5.0**0.5))
    assert alignment({name: -tensor for name, tensor in way.items()}, way) == pytest.approx(-1.0)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in way.items()}
    assert alignment(nothing, way) == 0.0
    assert alignment(way, nothing) is None and alignment(way, {}) is None
    assert alignment({"own layer": torch.ones(1)}, way) is None


def test_a_server_without_a_sample_of_these_classes_cannot_judge() -> None:
    x, y = torch.zeros(4, 5), torch.full((4,), 2)
    test = TrainingSet(x, y, torch.zeros(5), torch.ones(5))
    with pytest.raises(ConfigError, match="have none of the 2 classes seen so far"):
        Judge(test, num_classes=2, samples=10, seed=4)
