"""Features of pretrained networks, computed once for all runs of a table.

A fixed network gives each image the same features in every row and at every seed, up to the last bits, which
depend on the batch an image was in. So the seconds of later runs are those of everything else.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from perennial.models.feature_maps.pretrained import Pretrained


@contextmanager
def kept_features() -> Iterator[None]:
    """Within the block, each image goes through each pretrained network once.

    Of this process alone: runs in other processes compute theirs. It takes about 8 KB of memory an image of
    EfficientNet-Lite0 with four stages.
    """
    whole = Pretrained.forward
    kept: dict[tuple[str, bytes], Tensor] = {}

    def forward(self: Pretrained, pixels: Tensor) -> Tensor:
        about = f"{self.about} {tuple(pixels.shape[1:])}"
        keys = [(about, hashlib.blake2b(image.numpy().tobytes()).digest()) for image in pixels.cpu()]
        # an image that is there twice is asked for once
        missing = {key: row for row, key in enumerate(keys) if key not in kept}
        if missing:
            rows = list(missing.values())
            kept.update(zip(missing, whole(self, pixels[rows]).detach().clone(), strict=True))
        return torch.stack([kept[key] for key in keys])

    Pretrained.forward = forward
    try:
        yield
    finally:
        Pretrained.forward = whole
