"""Digests: their shapes, the fixed encoder, and the model that reads them."""

import pytest
import torch
from torch.nn import functional as F

from perennial.foundation.streams import stream
from perennial.models.config import ModelConfig
from perennial.models.digest_networks import (
    DigestTwoBranchModel,
    FeatureEncoder,
    GuidanceProducer,
    compute_digest_shape,
    hash_encoder,
)
from perennial.models.factory import build_model
from perennial.models.flat import FlatParameters
from perennial.models.incremental import complete_state, load_complete, select_travelling

SHAPES = {
    (1, 8, 8): (4, 4, 4),
    (1, 7, 5): (4, 4, 3),
    (3, 32, 32): (4, 8, 8),
    (1, 28, 28): (4, 8, 8),
    (3, 64, 48): (4, 8, 8),
    (1, 40, 6): (4, 8, 8),
    (40,): (64,),
}


def _random(shape: tuple[int, ...], seed: int) -> FeatureEncoder:
    return FeatureEncoder(shape, seed)


def _model(shape=(1, 8, 8), backbone="small_cnn", seed=1):
    model = build_model(ModelConfig(name="digest_two_branch", backbone=backbone), shape, 3, seed)
    assert isinstance(model, DigestTwoBranchModel)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_digest_and_guidance_shapes(shape):
    x = torch.rand(2, *shape)
    features = _random(shape, seed=1)(x)
    assert features.shape == (2, *SHAPES[shape]) and compute_digest_shape(shape) == SHAPES[shape]
    assert features.min() == 0
    assert features.max() > 0
    guidance = GuidanceProducer(shape, seed=1)(features)
    assert guidance.shape == x.shape
    assert len(shape) == 1 or (guidance.min() >= 0 and guidance.max() <= 1)


def test_the_encoder_is_the_same_everywhere_and_its_hash_says_so():
    torch.rand(1)
    before = torch.random.get_rng_state()
    one = _random((1, 8, 8), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert hash_encoder(one) == hash_encoder(_model().encoder)
    assert hash_encoder(one) != hash_encoder(_random((1, 8, 8), seed=2))
    assert len({hash_encoder(_random(shape, seed=1)) for shape in SHAPES}) == len(SHAPES)
    with torch.no_grad():
        next(one.parameters())[0] += 1e-6
    assert hash_encoder(one) != hash_encoder(_model().encoder)


def test_the_encoder_neither_travels_nor_learns():
    model = _model()
    fingerprint = hash_encoder(model.encoder)
    assert {key.split(".")[0] for key in select_travelling(model)} == {"backbone", "head"}
    flat = FlatParameters(model)
    before = flat.vector.clone()
    optimizer = torch.optim.SGD([flat.trainable], lr=0.1, weight_decay=0.1)
    model.train()
    F.cross_entropy(model(torch.rand(6, 1, 8, 8)), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
    assert len(flat.gradient) == len(flat.trainable)
    optimizer.step()
    changed = flat.view_tensors(flat.vector - before)
    assert all(torch.count_nonzero(tensor) > 0 for tensor in changed.values())
    assert hash_encoder(model.encoder) == fingerprint


def test_it_grows_and_is_rebuilt_like_any_model():
    model = _model()
    model.grow(5, stream(1, "head", 2))
    copy = build_model(ModelConfig(name="digest_two_branch", backbone="small_cnn"), (1, 8, 8), 5, seed=8)
    load_complete(copy, complete_state(model))
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(copy(x), model(x))
