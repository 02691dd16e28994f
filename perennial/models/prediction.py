"""Turns a model's logits into what a person reads, and a saved model into one module that does so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from perennial.models.class_means import NEVER
from perennial.models.saved import Confidence, SavedModel

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


def predict_answers(logits: Tensor, confidence: Confidence, classes: Sequence[str] = ()) -> Answers:
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
    return Answers(compute_probabilities(logits.double(), confidence.temperature or 1.0), sets, reached)


def compute_probabilities(logits: Tensor, temperature: float) -> Tensor:
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


class Exported(nn.Module):
    """(B, *shape) samples -> ((B, M) probabilities, (B,) int64 index of the most probable class).

    With operating points, (B, K) bool too: whether each is reached, in the order of Confidence.points.

    Samples are 8-bit pixels as numbers from 0 to 255 (uint8) or float32 numbers in the data's own scale. What
    comes before the network is inside: scaling, standardisation, what stands for a missing number (NaN);
    and what comes after it: temperature and softmax.
    """

    mean: Tensor
    std: Tensor
    fill: Tensor

    def __init__(self, saved: SavedModel) -> None:
        super().__init__()
        inputs = saved.inputs
        self.classifier = saved.classifier
        self.pixels = inputs.stored == "uint8"
        self.temperature = saved.confidence.temperature or 1.0
        self.points = [
            (saved.classes.index(name), least) for name, (_, least, *_) in saved.confidence.points.items()
        ]
        shape = (-1, *[1] * (len(inputs.shape) - 1))
        self.register_buffer("mean", inputs.mean.reshape(shape).clone())
        self.register_buffer("std", inputs.std.reshape(shape).clone())
        self.register_buffer("fill", inputs.filling.reshape(shape).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.pixels:
            standard = x.to(torch.float32) * (1 / (255 * self.std)) - self.mean / self.std
        else:
            known = torch.where(x.isnan(), self.fill.expand_as(x), x) if x.ndim == 2 else x
            standard = (known - self.mean) / self.std
        logits = self.classifier(standard)
        stated = compute_probabilities(logits, self.temperature)
        answer = stated, stated.argmax(dim=1)
        if not self.points:
            return answer
        scaled, every = logits / self.temperature, range(logits.shape[1])
        odds = [
            scaled[:, label] - scaled[:, [other for other in every if other != label]].logsumexp(dim=1)
            for label, _ in self.points
        ]
        reached = [own >= least for own, (_, least) in zip(odds, self.points, strict=True)]
        return *answer, torch.stack(reached, dim=1)

    def build_example(self, saved: SavedModel) -> Tensor:
        """(2, *shape) zeros of the type that forward takes, for tracing."""
        return torch.zeros(2, *saved.inputs.shape, dtype=torch.uint8 if self.pixels else torch.float32)
