"""The gate, what is frozen, and the step from one task to the next."""

import pytest
import torch
from torch.nn import functional as F

from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.dual_backbone import DualBackboneModel
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import complete_state, load_complete, select_travelling

SHAPE = (1, 8, 8)
CONFIG = ModelConfig(name="dual_backbone", backbone="small_cnn", norm="batch")


def _build(num_classes=2, config=CONFIG, seed=1):
    model = build_model(config, SHAPE, num_classes, seed)
    assert isinstance(model, DualBackboneModel)
    return model


def _batch(classes):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(8, *SHAPE, generator=generator), torch.arange(8) % classes


def _train(model, steps=4):
    flat = FlatParameters(model)
    optimizer = torch.optim.SGD([flat.trainable], lr=0.1, momentum=0.9)
    x, y = _batch(model.num_classes)
    model.train()
    for _ in range(steps):
        flat.gradient.zero_()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _snapshot(model):
    return {key: tensor.clone() for key, tensor in complete_state(model).items()}


def _next_task(model, num_classes, task):
    previous = _snapshot(model)
    model.grow(num_classes, stream(1, "head", task))
    model.begin_task(previous)
    return previous


def test_the_second_task_starts_as_the_first_ended():
    model = _build()
    _train(model)
    x, _ = _batch(2)
    ended_features, ended = model.eval().features(x), model(x)
    head = model.head.weight.detach().clone()
    _next_task(model, 4, 2)
    model.eval()
    assert torch.equal(model.head.weight[:2], head)
    assert torch.equal(model.features(x), ended_features)
    assert model.gate is not None
    with torch.no_grad():
        model.gate.excite.weight.normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.features(x), ended_features), "old equals new, so no gate can matter"
    # a wider matrix product may add in another order, hence not torch.equal
    torch.testing.assert_close(model(x)[:, :2], ended, rtol=0, atol=1e-6)


def test_the_old_backbone_never_learns_nor_travels():
    model = _build()
    _train(model)
    _next_task(model, 4, 2)
    frozen = {key: tensor for key, tensor in _snapshot(model).items() if key.startswith("old_backbone.")}
    trained = _snapshot(model)
    _train(model)
    after = complete_state(model)
    assert any(key.endswith("running_mean") for key in frozen)
    assert all(torch.equal(after[key], tensor) for key, tensor in frozen.items())
    assert model.old_backbone is not None
    assert all(parameter.grad is None for parameter in model.old_backbone.parameters())
    assert not any(parameter.requires_grad for parameter in model.old_backbone.parameters())
    assert not any(module.training for module in model.old_backbone.modules()) and model.backbone.training
    assert set(select_travelling(model)) == set(after) - set(frozen)
    for key in ("backbone.conv1.weight", "gate.squeeze.weight", "gate.excite.weight", "head.weight"):
        assert not torch.equal(after[key], trained[key]), key


def test_each_task_freezes_the_new_backbone_and_resets_the_gate():
    model = _build()
    _train(model)
    _next_task(model, 4, 2)
    assert model.gate is not None
    first_gate = model.gate.squeeze.weight.detach().clone()
    _train(model)
    previous = _next_task(model, 6, 3)
    state = complete_state(model)
    for key in (key for key in state if key.startswith("old_backbone.")):
        assert torch.equal(state[key], previous[key.removeprefix("old_")]), key
    assert torch.equal(state["gate.squeeze.weight"], first_gate)
    assert torch.count_nonzero(state["gate.excite.weight"]) == 0
    model.begin_task(None)
    assert select_travelling(model).keys() == complete_state(model).keys()


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
def test_a_teacher_is_rebuilt_from_the_complete_state(backbone):
    config = ModelConfig(name="dual_backbone", backbone=backbone)
    model = _build(config=config)
    _train(model)
    first = _next_task(model, 4, 2)
    _train(model)
    second = _snapshot(model)
    x, _ = _batch(2)
    expected = model.eval()(x)
    teacher = _build(4, config, seed=9)
    load_complete(teacher, second)
    assert torch.equal(teacher.eval()(x), expected)
    rows = _build(2, config, seed=9)
    load_complete(
        rows, second | {"head.weight": second["head.weight"][:2], "head.bias": second["head.bias"][:2]}
    )
    load_complete(rows, first)
    assert rows.old_backbone is None and rows.gate is None
    assert complete_state(rows).keys() == first.keys()
