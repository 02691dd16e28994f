"""Whether an update points where a loss falls."""

import math
from collections.abc import Mapping

from torch import Tensor


def alignment(update: Mapping[str, Tensor], descent: Mapping[str, Tensor]) -> float | None:
    """Cosine of an update and a direction over the tensors that both have, from -1 to 1.

    None where they share none, or for a direction of zero; 0 for an update of zero, which points nowhere.
    """
    shared = [name for name in descent if name in update]
    rows = [(update[name].flatten().to(descent[name].device), descent[name].flatten()) for name in shared]
    dot = sum(float(own @ way) for own, way in rows)
    own, way = (math.hypot(*(float(row[side].norm()) for row in rows)) for side in (0, 1))
    if not 0 < way < math.inf:
        return None
    return dot / own / way if own else 0.0
