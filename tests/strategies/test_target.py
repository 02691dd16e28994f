"""TARGET: inputs made from a model alone, and what a site does with them."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from perennial.baselines.inversion import _watch_statistics, synthesise
from perennial.baselines.target import MadeInputs, Target, TargetSite
from perennial.foundation.errors import ConfigError
from perennial.learning.site_method import LocalTurn
from perennial.models.incremental import IncrementalModel
from perennial.protocol.messages import TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.round.request import TaskStart

STAMP = {
    "run": "0" * 16,
    "experiment": "e" * 64,
    "class_order": "c" * 64,
    "task": 2,
    "round": 3,
    "num_classes": 3,
}


def teacher() -> nn.Module:
    """Sure of the sign of the first number, and of nothing else."""
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[8.0, 0.0], [-8.0, 0.0], [0.0, 0.0]]))
        layer.bias.zero_()
    return layer


def test_the_model_knows_what_it_is_shown() -> None:
    model = teacher()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, logits = synthesise(model, 2, (2,), 20, seed=1, task=2, steps=60)
    assert inputs.shape == (20, 2)
    assert logits.shape == (20, 2)
    assert torch.allclose(logits, model(inputs)[:, :2])
    right = logits.argmax(dim=1) == torch.arange(20) % 2
    assert right.float().mean() > 0.9
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_same_seed_makes_the_same_inputs_whatever_was_drawn_before() -> None:
    first = synthesise(teacher(), 2, (2,), 6, seed=1, task=2, steps=3)[0]
    torch.rand(5)
    second = synthesise(teacher(), 2, (2,), 6, seed=1, task=2, steps=3)[0]
    other = synthesise(teacher(), 2, (2,), 6, seed=1, task=3, steps=3)[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def opened(method: dict[str, torch.Tensor] | None) -> MadeInputs | None:
    """The term that the site half makes of a request with these tensors."""
    tensors = None if method is None else Tensors(method)
    turn = SimpleNamespace(
        site="a",
        seed=1,
        learner=SimpleNamespace(batch_size=4),
        request=TrainRequest(**STAMP, arrays=Tensors(), method=tensors),
        input_shape=(2,),
        device=torch.device("cpu"),
    )
    half = TargetSite({"distillation": 2.0})
    half.open(cast(LocalTurn, turn))
    return half.make_extra()


def test_a_model_that_agrees_has_nothing_to_learn() -> None:
    model = cast(IncrementalModel, teacher())
    x = torch.randn(10, 2)
    agreeing = {"rehearsal/x": x, "rehearsal/logits": model(x)[:, :2].detach()}

    def loss(rehearsal: MadeInputs | None) -> float:
        assert rehearsal is not None
        x, logits = rehearsal.draw()
        return float(rehearsal.term(model(x), logits).mean().detach())

    rehearsal = opened(agreeing)
    assert loss(rehearsal) == pytest.approx(0.0, abs=1e-6)
    disagreeing = {"rehearsal/x": x, "rehearsal/logits": -agreeing["rehearsal/logits"]}
    other = opened(disagreeing)
    assert loss(other) > 0.1
    assert opened(None) is None


X, LOGITS = torch.zeros(5, 2), torch.zeros(5, 2)


def test_nothing_is_made_before_there_is_anything_to_forget() -> None:
    strategy = Target()
    strategy.begin_task(TaskStart(1, 2, range(2), {}, ("a",)))
    assert not strategy.made
    with pytest.raises(ConfigError, match="a run of Perennial alone"):
        strategy.begin_task(TaskStart(2, 4, range(2, 4), {}, ("a",)))


def test_the_distance_of_batch_statistics_is_the_sum_of_those_of_mean_and_variance() -> None:
    layer = torch.nn.BatchNorm2d(2).eval()
    assert layer.running_mean is not None and layer.running_var is not None
    layer.running_mean.copy_(torch.tensor([1.0, 1.0]))
    layer.running_var.copy_(torch.tensor([4.0, 1.0]))
    distance = _watch_statistics(layer)
    assert float(distance()) == 0.0, "nothing has been seen"
    # both channels hold -1 and 1: means of 0 and variances of 1
    layer(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 2, 3, 3))
    assert float(distance()) == pytest.approx(2**0.5 + 3.0)
