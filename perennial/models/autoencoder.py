"""Trains FedDig's encoder as half of an autoencoder, on public data.

The other half has the layers of the guidance producer, which does the same work later: from features to an
input. A convolutional autoencoder, as in Hsu et al. 2022 (arXiv 2210.00737).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from perennial.foundation.errors import DataError
from perennial.foundation.streams import stream
from perennial.models.digest_encoders import ConvolutionalEncoder, FeatureEncoder
from perennial.models.digest_networks import GuidanceProducer

ENCODER_BATCH = 2048

Batch = Callable[[Tensor], tuple[Tensor, Tensor]]
"""rows (B,) -> (inputs as a model sees them, what to draw of each: pixels in [0, 1], or a table's row)."""


def train_autoencoder(
    input_shape: tuple[int, ...],
    count: int,
    batch: Batch,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    say: Callable[[int, float], None],
) -> FeatureEncoder:
    """Train an autoencoder on rows 0 .. count - 1 by mean squared error, and return its encoder.

    batch: gives the inputs of some rows. say: called with each epoch and its mean loss.
    The same arguments give the same bits. The features are scaled to a mean square of 1, so that bounds on
    digests mean the same with any encoder.
    Raises DataError when training diverged, or every feature is 0.
    """
    encoder = ConvolutionalEncoder(input_shape, seed)
    decoder = GuidanceProducer(input_shape, seed)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=lr)
    for epoch in range(1, epochs + 1):
        total = 0.0
        order = torch.from_numpy(stream(seed, "autoencoder-batches", epoch).permutation(count))
        for rows in order.split(batch_size):
            inputs, targets = batch(rows)
            loss = F.mse_loss(decoder(encoder(inputs)), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        say(epoch, total / count)
    _scale(encoder.requires_grad_(False), count, batch)
    return encoder


@torch.no_grad()
def _scale(encoder: ConvolutionalEncoder, count: int, batch: Batch) -> None:
    """Through the last layer with weights: what a ReLU lets pass grows as its input does."""
    square = sum(
        float(encoder(batch(rows)[0]).flatten(1).square().mean(dim=1).double().sum())
        for rows in torch.arange(count).split(ENCODER_BATCH)
    )
    mean_square = square / count
    if not 0 < mean_square < float("inf"):
        raise DataError(
            f"the trained features have mean square {mean_square:g}; allowed a finite number above 0: train "
            "with another seed or a lower lr"
        )
    for parameter in encoder.layers[-2].parameters():
        parameter.mul_(mean_square**-0.5)
