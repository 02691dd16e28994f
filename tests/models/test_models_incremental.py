"""Growing heads, and what of a model travels."""

import pytest
import torch

from perennial.foundation.errors import StateError
from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.factory import build_model
from perennial.models.incremental import complete_state, load_complete, select_travelling


def _model(**options):
    return build_model(ModelConfig(**{"name": "small_cnn", **options}), (1, 8, 8), 3, seed=1)


def _copy(model):
    return {key: tensor.clone() for key, tensor in complete_state(model).items()}


def test_growth_keeps_old_rows_and_draws_new_ones_from_the_stream():
    model = _model()
    with torch.no_grad():
        model.head.bias.uniform_(-1, 1)
    before = _copy(model)
    model.grow(7, stream(1, "head", 2))
    after = complete_state(model)
    assert model.num_classes == 7
    assert torch.equal(after["head.weight"][:3], before["head.weight"])
    assert torch.equal(after["head.bias"][:3], before["head.bias"])
    assert torch.count_nonzero(after["head.bias"][3:]) == 0
    new = after["head.weight"][3:]
    assert new.abs().max() <= 64**-0.5 and new.abs().mean() == pytest.approx(64**-0.5 / 2, rel=0.1)
    twin = _model()
    twin.grow(7, stream(1, "head", 2))
    assert torch.equal(twin.head.weight[3:], new)
    assert all(parameter.requires_grad for parameter in model.head.parameters())


def test_parameters_travel_before_float_buffers_and_counters_never():
    model = _model(norm="batch")
    keys = list(select_travelling(model))
    assert keys[: len(list(model.parameters()))] == [name for name, _ in model.named_parameters()]
    assert set(keys) - {name for name, _ in model.named_parameters()} == {
        f"backbone.norm{layer}.running_{statistic}" for layer in (1, 2) for statistic in ("mean", "var")
    }
    assert "backbone.norm1.num_batches_tracked" in model.state_dict()
    assert select_travelling(model).keys() == complete_state(model).keys()
    assert not any(tensor.requires_grad for tensor in select_travelling(model).values())


def test_a_frozen_part_does_not_travel_with_its_statistics():
    model = _model(norm="batch")
    model.backbone.norm1.requires_grad_(False)
    assert complete_state(model).keys() - select_travelling(model).keys() == {
        f"backbone.norm1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state.pop("head.bias"), "'head.bias': missing"),
        (
            lambda state: state.update({"head.weights": torch.zeros(1)}),
            "'head.weights': unknown.*'head.weight'",
        ),
        (
            lambda state: state.update({"head.weight": torch.zeros(4, 64)}),
            r"'head.weight': found.*\(4, 64\).*\(3, 64\)",
        ),
        (
            lambda state: state.update({"head.bias": torch.zeros(3).double()}),
            "'head.bias': found torch.float64",
        ),
    ],
)
def test_a_state_of_another_model_is_refused_and_copies_nothing(damage, words):
    model = _model()
    before = _copy(model)
    state = {key: tensor + 1 for key, tensor in before.items()}
    damage(state)
    with pytest.raises(StateError, match=words):
        load_complete(model, state)
    assert all(torch.equal(before[key], tensor) for key, tensor in complete_state(model).items())
