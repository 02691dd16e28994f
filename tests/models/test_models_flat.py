"""A model on one vector behaves as it did before."""

import pytest
import torch
from torch.nn import functional as F

from perennial.foundation.errors import StateError
from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import select_travelling

SHAPE = (2, 8, 8)


def _model(**options):
    return build_model(ModelConfig(**{"name": "small_cnn", "norm": "batch", **options}), SHAPE, 3, seed=1)


def _batch():
    generator = torch.Generator().manual_seed(5)
    return torch.rand(6, *SHAPE, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])


def _train(model, optimizer, clear, steps=3, memory_format=torch.contiguous_format):
    x, y = _batch()
    for _ in range(steps):
        clear()
        F.cross_entropy(model(x.to(memory_format=memory_format)), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    ],
)
def test_training_on_the_vector_is_training_the_model(make):
    plain, ours = _model(), _model()
    optimizer = make(plain.parameters())
    _train(plain, optimizer, optimizer.zero_grad)
    flat = FlatParameters(ours)
    _train(ours, make([flat.trainable]), flat.gradient.zero_)
    for key, tensor in select_travelling(plain).items():
        torch.testing.assert_close(select_travelling(ours)[key], tensor)
        torch.testing.assert_close(flat.view_tensors(flat.vector)[key], tensor)


def test_views_load_and_flatten_are_inverse():
    model = _model()
    flat = FlatParameters(model)
    other = torch.randn(len(flat.vector), generator=torch.Generator().manual_seed(1))
    views = flat.view_tensors(other)
    assert all(
        view.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for view in views.values()
    )
    assert torch.equal(flat.flatten(dict(reversed(views.items()))), other)
    flat.load(views)
    assert torch.equal(flat.vector, other)
    assert all(torch.equal(tensor, views[key]) for key, tensor in select_travelling(model).items())
    flat.load(select_travelling(model))
    assert torch.equal(flat.vector, other)
    with pytest.raises(StateError, match=r"vector: found shape \(5,\)"):
        flat.view_tensors(torch.zeros(5))


def test_frozen_parameters_stay_outside():
    model = _model()
    frozen = model.backbone.get_submodule("conv1").requires_grad_(False).get_parameter("weight")
    before = frozen.detach().clone()
    flat = FlatParameters(model)
    assert not any(key.startswith("backbone.conv1") for key in flat.keys)
    _train(model, torch.optim.SGD([flat.trainable], lr=0.1, weight_decay=0.1), flat.gradient.zero_)
    assert torch.equal(frozen, before)
    assert frozen.grad is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state.pop("head.bias"), "'head.bias': missing"),
        (
            lambda state: state.update({"head.weigth": torch.zeros(1)}),
            "'head.weigth': unknown.*'head.weight'",
        ),
        (
            lambda state: state.update({"head.bias": torch.zeros(3, 1)}),
            r"'head.bias': found.*\(3, 1\).*\(3,\)",
        ),
        (
            lambda state: state.update({"head.bias": torch.zeros(3).half()}),
            "'head.bias': found torch.float16",
        ),
    ],
)
def test_tensors_of_another_model_are_refused(damage, words):
    flat = FlatParameters(_model())
    before = flat.vector.clone()
    state = dict(flat.view_tensors(before + 1))
    damage(state)
    with pytest.raises(StateError, match=words):
        flat.load(state)
    assert torch.equal(flat.vector, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.grow(5, stream(1, "head", 2)),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.double().float(),
    ],
)
def test_a_model_that_left_its_vector_is_noticed(change):
    model = _model()
    flat = FlatParameters(model)
    change(model)
    with pytest.raises(StateError, match="no longer lives in this vector"):
        flat.load(flat.view_tensors(flat.vector.clone()))
