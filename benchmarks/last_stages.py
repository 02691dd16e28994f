"""The last two stages of an EfficientNet, trained behind stored outputs of the others, by one site or many.

Behind the frozen blocks an image is small (6 x 8 pixels at 96 x 128), and a processor is fastest with
products of matrices: a pointwise convolution is one, and a depthwise convolution one a channel, from all
pixels to all pixels. Normalisation uses the statistics of ImageNet throughout; its scales and shifts are
trained.

Shapes: B images, V mirror images of each, C channels, P pixels.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.data.schedule import TaskSchedule
from perennial.foundation.streams import stream
from perennial.learning.losses import log_prior
from perennial.models.feature_maps.ball import unit_rows

TRAINED = 2
"""Stages that are trained, with the last layer."""
BATCH, HEAD_FASTER = 64, 10
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Stored:
    """What does not change in training. views: (N, V, C, P) outputs of the frozen blocks.

    before: (N, V, d) averages of earlier stages that stand beside the last layer, each of length 1.
    beside: (N, e) features of other maps, of length 1 each. size: (height, width) of the P pixels.
    """

    views: Tensor
    before: Tensor
    beside: Tensor
    size: tuple[int, int]


@dataclass(frozen=True)
class Training:
    """lr: of the stages; the head's is ten times that. lengths: rounds of each task, or epochs in one place.

    The step size falls from round to round of a task as a half cosine.
    """

    lr: float
    lengths: tuple[int, ...]

    def step_size(self, round_: int, rounds: int) -> float:
        """Of a round, from 0, of so many."""
        return self.lr * (1 + cos(pi * round_ / rounds)) / 2


class LastStages(nn.Module):
    """The network's last stages and last layer, and a linear classifier that starts at zero."""

    def __init__(self, network: Any, size: tuple[int, int], classes: int) -> None:
        """network: of timm, which stays as it is. size: of the images that the frozen blocks put out."""
        super().__init__()
        copied = deepcopy(network)
        self.stages: Any = nn.ModuleList(copied.blocks[-TRAINED:])
        self.conv, self.bn = copied.conv_head, copied.bn2
        self.head = nn.Linear(self.conv.out_channels, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._taps: dict[nn.Module, Tensor] = {}
        for block in (block for stage in self.stages for block in stage):
            self._taps[block], size = _taps(block.conv_dw, size)
        self.eval().requires_grad_(True)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(C, P, B) outputs of the frozen blocks -> (B, d) last layer and (B, C) averages of each stage."""
        averages = []
        for stage in self.stages:
            for block in stage:
                x = self._block(block, x)
            averages.append(x.mean(dim=1).T)
        return _pointwise(self.conv, self.bn, x).mean(dim=1).T, averages

    def _block(self, block: Any, x: Tensor) -> Tensor:
        scale, shift = _scale_and_shift(block.bn2)
        inner = _pointwise(block.conv_pw, block.bn1, x)
        taps = (block.conv_dw.weight.flatten(1) * scale[:, None]) @ self._taps[block]
        inner = block.bn2.act(
            torch.baddbmm(shift[:, None, None], taps.view(len(taps), -1, x.shape[1]), inner)
        )
        found = _pointwise(block.conv_pwl, block.bn3, inner)
        return found + x if block.has_skip else found

    @property
    def trained(self) -> list[Tensor]:
        """What travels in a round."""
        return [parameter.data for parameter in self.parameters()]

    @torch.no_grad()
    def take(self, values: Sequence[Tensor]) -> None:
        """Replace what is trained."""
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def features(self, stored: Stored, rows: Tensor) -> tuple[Tensor, Tensor]:
        """((n, d) of length 1, as Pretrained gives them behind a symmetry; (n, C) logits)."""
        found, logits = [], []
        for part in rows.split(4 * BATCH):
            views, own = [], []
            for view in range(stored.views.shape[1]):
                last, averages = self(_as_columns(stored.views[part, view]))
                before = stored.before[part, view]
                views.append(torch.cat([unit_rows(last), before, *map(unit_rows, averages)], dim=1))
                own.append(self.head(last))
            found.append(unit_rows(torch.stack(views).mean(dim=0)))
            logits.append(torch.stack(own).mean(dim=0))
        return torch.cat(found), torch.cat(logits)


def _scale_and_shift(bn: Any) -> tuple[Tensor, Tensor]:
    scale = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
    return scale, bn.bias - bn.running_mean * scale


def _pointwise(conv: Any, bn: Any, x: Tensor) -> Tensor:
    scale, shift = _scale_and_shift(bn)
    weight = conv.weight.flatten(1) * scale[:, None]
    return bn.act(torch.addmm(shift[:, None], weight, x.flatten(1)).view(len(weight), *x.shape[1:]))


def _taps(conv: Any, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """((K, out x in pixels): which of K weights leads from a pixel to another; size of what comes out)."""
    count = conv.kernel_size[0] * conv.kernel_size[1]
    probe = type(conv)(1, count, conv.kernel_size, conv.stride, conv.padding, bias=False)
    with torch.no_grad():
        probe.weight.copy_(torch.eye(count).view_as(probe.weight))
        seen = probe(torch.eye(size[0] * size[1]).view(-1, 1, *size))
    return seen.permute(1, 2, 3, 0).reshape(count, -1), (seen.shape[2], seen.shape[3])


def _as_columns(x: Tensor) -> Tensor:
    """(B, C, P) -> (C, P, B)."""
    return x.permute(1, 2, 0).contiguous()


def optimizer_of(model: LastStages) -> torch.optim.Optimizer:
    """AdamW whose step sizes one_epoch sets."""
    head = list(model.head.parameters())
    stages = [parameter for name, parameter in model.named_parameters() if not name.startswith("head.")]
    return torch.optim.AdamW([{"params": stages}, {"params": head}], weight_decay=WEIGHT_DECAY, fused=True)


def one_epoch(
    model: LastStages,
    optimizer: torch.optim.Optimizer,
    data: tuple[Stored, Tensor, Tensor],
    classes: int,
    lr: float,
    draw: np.random.Generator,
) -> None:
    """Balanced softmax over the first classes; a class without an image in rows is left out of it.

    data: what is stored, (N,) labels of all, and the rows to train on. For each image one of its mirror
    images is drawn.
    """
    stored, y, rows = data
    for group, times in zip(optimizer.param_groups, (1, HEAD_FASTER), strict=True):
        group["lr"] = times * lr
    prior = log_prior(torch.bincount(y[rows], minlength=classes), 1.0, 1)
    for part in torch.from_numpy(draw.permutation(len(rows))).split(BATCH):
        chosen = rows[part]
        view = torch.from_numpy(draw.integers(0, stored.views.shape[1], len(chosen)))
        last, _ = model(_as_columns(stored.views[chosen, view]))
        loss = F.cross_entropy(model.head(last)[:, :classes] + prior, y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_in_one_place(
    model: LastStages, stored: Stored, y: Tensor, rows: Tensor, training: Training, seed: int
) -> None:
    """The ceiling: all classes and all images at once. y: (N,) labels."""
    optimizer, (epochs,) = optimizer_of(model), training.lengths
    for epoch in range(epochs):
        draw = stream(seed, "adapt-pilot", "pooled", epoch)
        lr = training.step_size(epoch, epochs)
        one_epoch(model, optimizer, (stored, y, rows), model.head.out_features, lr, draw)


def train_task(
    model: LastStages,
    stored: Stored,
    y: Tensor,
    sites: Mapping[str, Tensor],
    training: Training,
    of: tuple[TaskSchedule, int],
    seed: int,
) -> int:
    """Rounds of averaging on all records of the classes that came so far; how many times a site took part.

    sites: name -> its training rows. of: the schedule, and the task, from 1. In each round every site with
    such records trains for one epoch from the common network; its weight is their number.
    """
    schedule, task = of
    classes, rounds, parts = schedule.num_classes(task), training.lengths[task - 1], 0
    held = {name: rows[y[rows] < classes] for name, rows in sites.items()}
    total = sum(map(len, held.values()))
    for round_ in range(rounds):
        common = [value.clone() for value in model.trained]
        mean = [torch.zeros_like(value, dtype=torch.float64) for value in common]
        for name, rows in held.items():
            if len(rows):
                model.take(common)
                draw = stream(seed, "adapt-pilot", name, task, round_)
                lr = training.step_size(round_, rounds)
                one_epoch(model, optimizer_of(model), (stored, y, rows), classes, lr, draw)
                for place, value in enumerate(model.trained):
                    mean[place] += value.double() * (len(rows) / total)
                parts += 1
        model.take(mean)
    return parts
