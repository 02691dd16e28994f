"""The model block: what each network takes, and errors that name the key and the network."""

import pytest
from pydantic import ValidationError

from perennial.models.config import ModelConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "small_cnn", "hidden": [32]}, ["'hidden'", "small_cnn", "mlp"]),
        ({"name": "mlp", "width": 32}, ["'width'", "mlp", "small_cnn"]),
        ({"name": "dual_backbone", "backbone": "resnet18", "channels": [8, 8]}, ["'channels'", "resnet18"]),
        ({"name": "mlp", "squeeze_excitation": True}, ["'squeeze_excitation'", "mlp", "resnet18"]),
        (
            {"name": "small_cnn", "channels": [1, 8], "squeeze_excitation": True},
            ["'channels'", "2 or more"],
        ),
        ({"name": "resnet18", "norm": "none"}, ["'norm'", "resnet18", "group, batch"]),
        ({"name": "dual_backbone"}, ["'backbone'", "dual_backbone", "small_cnn"]),
        ({"name": "mlp", "backbone": "small_cnn"}, ["'backbone'", "mlp", "dual_backbone"]),
        ({"name": "dual_backbone", "backbone": "dual_backbone"}, ["backbone", "small_cnn"]),
        ({"name": "mlp", "hidden": [0]}, ["hidden"]),
        ({"name": "mlp", "dropout": 1.0}, ["dropout"]),
        ({"name": "mlp", "depth": 3}, ["depth"]),
    ],
)
def test_an_option_that_the_network_does_not_take_is_named(settings, words):
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate(settings)
    for word in words:
        assert word in str(error.value)
