"""A saved model as one module, from samples as the data hold them to probabilities."""

import torch
from torch import Tensor, nn

from perennial.models.prediction import probabilities
from perennial.models.saved import SavedModel


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
        stated = probabilities(logits, self.temperature)
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

    def example(self, saved: SavedModel) -> Tensor:
        """(2, *shape) zeros of the type that forward takes, for tracing."""
        return torch.zeros(2, *saved.inputs.shape, dtype=torch.uint8 if self.pixels else torch.float32)
