"""Makes inputs from a model alone, by training a generator.

The generator learns to make inputs of which the model is sure, while a second model that learns from them is
not yet sure.

Zhang et al. 2023 (TARGET, arXiv 2303.06937), after Yin et al. 2020 (DeepInversion, arXiv 1912.08795).
"""

import copy
from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perennial.foundation.streams import stream, torch_seed
from perennial.models.layers import seed_initialisation

NOISE = 64
WIDTH = 32


class SampleGenerator(nn.Module):
    """Images: two convolutions, each after doubling the resolution; rows of a table: two linear layers."""

    def __init__(self, input_shape: tuple[int, ...], seed: int, number: int) -> None:
        """Initialise the weights from the stream of `seed` and `number`."""
        super().__init__()
        self.input_shape = input_shape
        self._image = len(input_shape) == 3
        with seed_initialisation(seed, "sample-generator", number):
            if self._image:
                channels, height, width = input_shape
                self._sides = [
                    (-(-height // 4), -(-width // 4)),
                    (-(-height // 2), -(-width // 2)),
                    (height, width),
                ]
                self.start = nn.Linear(NOISE, WIDTH * prod(self._sides[0]))
                self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
                self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
                self.conv2 = nn.Conv2d(WIDTH, channels, 3, padding=1)
                self.last: nn.Module = nn.BatchNorm2d(channels, affine=False)
            else:
                self.start = nn.Linear(NOISE, 4 * WIDTH)
                self.norm1 = nn.BatchNorm1d(4 * WIDTH)
                self.end = nn.Linear(4 * WIDTH, prod(input_shape))
                self.last = nn.BatchNorm1d(prod(input_shape), affine=False)

    def forward(self, noise: Tensor) -> Tensor:
        x = self.start(noise)
        if not self._image:
            x = F.leaky_relu(self.norm1(x), 0.2)
            return self.last(self.end(x)).view(-1, *self.input_shape)
        x = self.norm1(x.view(-1, WIDTH, *self._sides[0]))
        x = self.conv1(F.interpolate(x, self._sides[1]))
        x = F.leaky_relu(self.norm2(x), 0.2)
        return self.last(self.conv2(F.interpolate(x, self._sides[2])))

    @torch.no_grad()
    def samples(self, noise: Tensor) -> Tensor:
        """Outputs without gradient; the module stays in training mode, so that batches are normalised."""
        return self(noise)


BATCH = 64
LR = 2e-3


BOUNDARY = 1.0
"""Weight of the disagreement with the second model."""
STATISTICS = 1.0
"""Weight of the distance from the running statistics of batch normalisation, if the model has any."""


def synthesise(
    teacher: nn.Module,
    classes: int,
    input_shape: tuple[int, ...],
    count: int,
    seed: int,
    task: int,
    steps: int = 200,
    temperature: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """(count, *input_shape) inputs and the teacher's (count, classes) logits on them.

    teacher: (B, *input_shape) -> logits, of which the first `classes` are used; left as it was. steps: of the
    generator's training. temperature: by which the disagreement is softened.
    """
    device = next(teacher.parameters()).device
    teacher = copy.deepcopy(teacher).eval().requires_grad_(False)
    student = copy.deepcopy(teacher).requires_grad_(True)
    with seed_initialisation(seed, "inversion", task):
        for module in student.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
    draw = torch.Generator().manual_seed(torch_seed(stream(seed, "inversion", task)))
    generator = SampleGenerator(input_shape, seed, task).to(device).train()
    distance = _watch_statistics(teacher)
    slow = torch.optim.Adam(generator.parameters(), LR)
    fast = torch.optim.Adam(student.parameters(), LR)
    for _ in range(steps):
        noise = torch.randn(BATCH, NOISE, generator=draw).to(device)
        labels = torch.randint(classes, (BATCH,), generator=draw).to(device)
        inputs = generator(_mark(noise, labels))
        sure = teacher(inputs)[:, :classes]
        loss = F.cross_entropy(sure, labels) + STATISTICS * distance()
        loss = loss - BOUNDARY * _measure_difference(student(inputs)[:, :classes], sure, temperature)
        slow.zero_grad()
        loss.backward()
        slow.step()
        inputs = inputs.detach()
        fast.zero_grad()
        _measure_difference(student(inputs)[:, :classes], sure.detach(), temperature).backward()
        fast.step()
    labels = torch.arange(count, device=device) % classes
    noise = torch.randn(count, NOISE, generator=draw).to(device)
    made = generator.samples(_mark(noise, labels))
    with torch.no_grad():
        return made, teacher(made)[:, :classes]


def _measure_difference(ours: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    """KL(theirs || ours), softened, mean over the batch."""
    return F.kl_div(
        F.log_softmax(ours / temperature, dim=1),
        F.log_softmax(theirs / temperature, dim=1),
        reduction="batchmean",
        log_target=True,
    )


def _mark(noise: Tensor, labels: Tensor) -> Tensor:
    """noise with the label in it: a fixed direction for each class."""
    marks = torch.sin((labels[:, None] + 1.0) * torch.arange(1, NOISE + 1, device=noise.device))
    return noise + 2 * marks


def _watch_statistics(model: nn.Module) -> Callable[[], Tensor]:
    """A function of the latest forward pass: how far its batch is from the running statistics."""
    seen: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.BatchNorm2d)
        x = inputs[0]
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        assert module.running_mean is not None and module.running_var is not None
        seen[module] = (mean - module.running_mean).norm() + (variance - module.running_var).norm()

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(look)

    def measure() -> Tensor:
        return torch.stack(list(seen.values())).sum() if seen else torch.zeros(())

    return measure
