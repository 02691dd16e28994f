"""Two public photographs, a temple and a flower, whose patches serve as filters for any images.

They come inside scikit-learn (CC BY 2.0; danielbuechele and vultilion on Flickr). On HAM10000 their patches
do as well as patches of CIFAR-100's images, and better than patches of noise or of drawn discs.
"""

import hashlib
from functools import lru_cache

import numpy as np

from perennial.foundation.errors import ConfigError

SHA256 = "99310b92a8963a4b9118f3a93695bf9d2f7c20a03361f1962972901ccd5560da"
"""Of the decoded pixels: another decoder of JPEG would give other filters."""
_LUMA = (0.299, 0.587, 0.114)


@lru_cache(maxsize=2)
def photographs(channels: int) -> tuple[np.ndarray, ...]:
    """scikit-learn's photographs, each (channels, H, W) float64 in 0..255; 1 channel is brightness.

    Raises ConfigError on another number of channels, or if they are decoded to other
    pixels than everywhere else.
    """
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(image).tobytes() for image in images)).hexdigest()
    if digest != SHA256:
        raise ConfigError(
            f"model.features: patches: scikit-learn's photographs have SHA-256 {digest:.12} here, and "
            f"{SHA256:.12} elsewhere; sites with another decoder of JPEG would have other filters"
        )
    if channels == 3:
        return tuple(image.transpose(2, 0, 1).astype(np.float64) for image in images)
    if channels == 1:
        return tuple((image @ np.array(_LUMA))[None] for image in images)
    raise ConfigError(f"model.features: patches: found images of {channels} channels; allowed 1 or 3")
