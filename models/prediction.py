"""From a model's logits to what a person reads: probabilities, prediction sets."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perennial.models.saved import Confidence

NONE_OF_THE_KNOWN = "none of the known classes"
"""What an empty prediction set reads."""


@dataclass(frozen=True, eq=False)
class Answers:
    """probabilities: (B, M), after temperature scaling. sets: (B, M) bool; None without calibration."""

    probabilities: Tensor
    sets: Tensor | None


def answers(logits: Tensor, confidence: Confidence) -> Answers:
    """What logits (B, M) say: a class is in the set if its unscaled probability reaches its threshold."""
    scaled = logits if confidence.temperature is None else logits / confidence.temperature
    sets = None
    if confidence.thresholds is not None:
        log_p = logits.double().log_softmax(dim=1)
        odds = (log_p - (-torch.expm1(log_p)).log()).nan_to_num(nan=-torch.inf)
        least = np.array(confidence.thresholds, dtype=np.float64)
        with np.errstate(divide="ignore"):
            edges = torch.from_numpy(np.log(least) - np.log1p(-least))
        # a probability is stored to 53 bits, and its odds are those of an edge to a few of the last ones
        sets = odds >= edges.to(odds.device) - 1e-9
    return Answers(scaled.softmax(dim=1), sets)
