"""Turns a model's logits into what a person reads: probabilities and prediction sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perennial.models.class_means import NEVER
from perennial.models.saved import Confidence

LEAST = torch.finfo(torch.float32).tiny
"""Stated of a class however improbable: 0 is said of those alone that no record was learnt of."""
NONE_OF_THE_KNOWN = "none of the known classes"
"""What an empty prediction set reads."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Predictions for B samples.

    probabilities: (B, M) float64, after scaling. sets: (B, M) bool; None without calibration.
    reached: class -> (B,) bool, whether its operating point is reached.
    """

    probabilities: Tensor
    sets: Tensor | None
    reached: Mapping[str, Tensor] = field(default_factory=dict)


def answers(logits: Tensor, confidence: Confidence, classes: Sequence[str] = ()) -> Answers:
    """Predictions from logits (B, M): a prediction set has the classes whose log odds reach their thresholds.

    classes: names by label, for operating points.
    """
    scaled = logits.double() / (confidence.temperature or 1.0)
    sets, odds = None, log_odds(scaled)
    if confidence.thresholds is not None:
        sets = odds >= torch.tensor(confidence.thresholds, dtype=torch.float64).to(scaled.device)
    places = {name: label for label, name in enumerate(classes)}
    reached = {
        name: odds[:, places[name]] >= least
        for name, (_, least, *_) in confidence.points.items()
        if name in places
    }
    return Answers(probabilities(logits.double(), confidence.temperature or 1.0), sets, reached)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """(B, M) softmax of logits / temperature: 0 for classes that are never predicted, above 0 for others."""
    stated = (logits / temperature).softmax(dim=1)
    return torch.where(logits > NEVER / 2, stated.clamp(min=LEAST), stated)


def log_odds(logits: Tensor) -> Tensor:
    """(..., M) log odds of each class's probability: finite for any finite logits of two classes or more.

    logits: (..., M) float64. The odds of the most probable class are taken from the others' logits, because
    1 - p of a probability that rounds to 1 would be 0; a class alone has infinite odds.
    """
    log_p = logits.log_softmax(dim=-1)
    odds = log_p - (-torch.expm1(log_p)).log()
    top = logits.argmax(dim=-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return odds.scatter(-1, top, logits.gather(-1, top) - rest).nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
