"""The judge of models: a fixed draw of the test samples of the classes seen so far."""

import numpy as np
import torch

from perennial.learning.batches import TrainingSet
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.server.evaluation import Judge


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
