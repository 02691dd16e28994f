"""Class means by hand: the nearest of them answers, and a class without one is never predicted."""

import torch

from perennial.foundation.streams import stream
from perennial.learning.evaluation import build_mean_classifier
from perennial.models.incremental import IncrementalModel


def test_means_by_hand_and_a_class_that_nobody_has_is_never_predicted() -> None:
    half = 0.5**0.5
    means = torch.tensor([[half, half], [0.0, 1.0], [0.0, 0.0]])
    model = IncrementalModel(torch.nn.Identity(), 2, 3, stream(1, "init"))
    predict = build_mean_classifier(model, means)
    inputs = torch.tensor([[1.0, 0.9], [-0.1, 1.0], [-1.0, -1.0]])
    assert predict(inputs).tolist() == [0, 1, 1]
