"""The 8x8 digits of the UCI test set, as scikit-learn bundles them.

Read without importing scikit-learn, which takes longer than a short run's first task.
Alpaydin and Kaynak 1998, doi 10.24432/C50P49.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from perennial.data.config import DataConfig
from perennial.data.images import conform
from perennial.data.samples import Samples, Source, constants
from perennial.foundation.errors import DataError

MEAN, STD = 0.3053, 0.3760


def load_digits(config: DataConfig) -> Source:
    """1797 samples, uint8 (N, 1, 8, 8), 0..16 stretched to 0..255; classes "0".."9"; no test part."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("data.source: 'digits' comes with scikit-learn, which is not installed")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise DataError(f"{path}: missing from the installed scikit-learn")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    x = conform(torch.from_numpy(pixels), config.size, config.color, config.resize)
    samples = Samples(x, torch.from_numpy(table[:, 64].astype(np.int64)))
    return Source(samples, None, tuple("0123456789"), *constants(config.normalise, x, (MEAN,), (STD,)))
