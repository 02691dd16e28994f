"""A weighted sum of updates whose bits do not depend on the order in which the updates arrive.

Floating-point addition is not associative; integer addition is. Each weighted update is rounded to the grid
of models/sum_grid.py and the grid indices are added as 64-bit integers, in the memory of one accumulator.

Error: a term w u is off by at most half a step of the grid, and by its own rounding in float64, 2^-53 |w u|.
So the mean of K updates, sum w u / sum w, is off by at most (step / 2) / (sum w / K) besides: half a step
over the mean weight. With five sites a step is 2^-28 for weights that are counts of samples, and a mean of
100 samples gives 1.9e-11; with 5,000 sites it is 2^-18, and 1.9e-8. Weights far below 1 cost accuracy.

The sum of a large float32 model on the CPU runs in the passes of exact_loops.py, any other in PyTorch's
operations. The two may round the last step of the grid differently; which of them runs depends on the model's
size, its types and the device.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from perennial.models.sum_grid import SumGrid
from perennial.strategies.sums.exact_loops import add_mean, add_rows, divide_rows

# Adding 1.5 * 2^52 grid steps puts every |value| < 2^51 steps into one binade whose spacing is the grid: the
# addition itself rounds to the grid, and the integer behind the float's bits counts grid steps from the
# anchor's own integer.
_ANCHOR_STEPS = 1.5 * 2.0**52
_FAST_STEPS = 2.0**50
_CHUNK = 1 << 15
LARGE_FROM = 1 << 22
"""Values in a model from which threads add it."""


class ExactSum:
    """Sum of weight * update over the updates of a round.

    like: name -> tensor; the shapes and device of every update to come. grid: the public arithmetic of this
    round. model_size: values in the whole model, where like is a part of it with a sum of its own.
    """

    def __init__(self, like: Mapping[str, Tensor], grid: SumGrid, model_size: int = 0) -> None:
        self.grid = grid
        self._anchor_value = _ANCHOR_STEPS * grid.step
        self._shapes = {name: t.shape for name, t in like.items()}
        self._groups = _group_names(like)
        self._steps = [
            torch.zeros(
                sum(like[name].numel() for name in group), dtype=torch.int64, device=like[group[0]].device
            )
            for group in self._groups
        ]
        self._anchors = 0
        self._weights: list[float] = []
        self._scratch: Tensor | None = None
        lengths = [len(steps) for steps in self._steps]
        self._large = max(model_size, sum(lengths)) >= LARGE_FROM and all(
            tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in like.values()
        )
        self._shares = divide_rows(lengths) if self._large else []

    def add(self, update: Mapping[str, Tensor], weight: float, norm: float) -> None:
        """Add weight * update. norm: L2 norm of the update, which bounds each of its values.

        Raises OverflowError for an update that is larger than the grid's share of one update; what else is
        in the sum makes no difference.
        """
        if not self.grid.holds(weight, norm):
            raise OverflowError(
                f"update: weight {weight:.3g} times norm {norm:.3g} does not fit the sum, which has room for "
                f"{self.grid.share:.3g} from one site: training diverges, or the site lies"
            )
        self._add([_flatten([update[name] for name in group]) for group in self._groups], weight, norm)

    def add_rows(self, rows: Tensor, weights: Sequence[float], norms: Sequence[float]) -> bool:
        """Add K updates, rows (K, P) in like's order; False, with nothing added, if one does not fit."""
        if not all(map(self.grid.holds, weights, norms)):
            return False
        lengths = [len(steps) for steps in self._steps]
        for row, weight, norm in zip(rows, weights, norms, strict=True):
            self._add(row.split(lengths), weight, norm)
        return True

    def _add(self, groups: Sequence[Tensor], weight: float, norm: float) -> None:
        """Add an update that the grid holds. groups: its values, in one row for each of the sum's."""
        fast = weight * norm < _FAST_STEPS * self.grid.step
        self._anchors += fast
        self._weights.append(weight)
        if fast and self._large:
            rows = [values.contiguous().numpy() for values in groups]
            add_rows([steps.numpy() for steps in self._steps], rows, weight, self._anchor_value, self._shares)
            return
        for given, steps in zip(groups, self._steps, strict=True):
            values = given.to(steps.device)
            if fast:
                self._add_in_pieces(steps, values, weight)
            else:
                steps.add_((values.double() * (weight / self.grid.step)).round().to(torch.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulator."""
        return sum(steps.nbytes for steps in self._steps)

    def _add_in_pieces(self, steps: Tensor, values: Tensor, weight: float) -> None:
        if self._scratch is None:
            longest = max(len(steps) for steps in self._steps)
            size = min(_CHUNK, longest) if steps.device.type == "cpu" else longest
            self._scratch = torch.empty(size, dtype=torch.float64, device=steps.device)
            self._anchor = torch.tensor(self._anchor_value, dtype=torch.float64, device=steps.device)
        # in pieces that stay in the processor's cache: three passes over memory become one
        size = len(self._scratch)
        for start in range(0, len(values), max(size, 1)):
            piece = values[start : start + size]
            room = self._scratch[: len(piece)]
            room.copy_(piece)
            torch.add(self._anchor, room, alpha=weight, out=room)
            _add_integers(steps[start : start + size], room.view(torch.int64))

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def weight(self) -> float:
        """Sum of the weights, rounded once, so that their order does not matter either."""
        return math.fsum(self._weights)

    @property
    def _offset(self) -> int:
        """What the additions of the anchor have added to the integers, modulo 2^64."""
        return _wrap(self._anchors * int(np.float64(self._anchor_value).view(np.int64)))

    def value(self) -> dict[str, Tensor]:
        """The sum as float64 tensors in the updates' shapes."""
        offset = self._offset
        total: dict[str, Tensor] = {}
        for group, steps in zip(self._groups, self._steps, strict=True):
            values = (steps - offset).to(torch.float64).mul_(self.grid.step)
            parts = values.split([self._shapes[name].numel() for name in group])
            total |= {name: part.view(self._shapes[name]) for name, part in zip(group, parts, strict=True)}
        return total

    def add_to(self, reference: Mapping[str, Tensor], divisor: float | None = None) -> dict[str, Tensor]:
        """reference + sum / divisor in the reference's dtype; divisor: by default the sum of the weights."""
        scale = 1.0 / (self.weight if divisor is None else divisor)
        if self._large and all(tensor.dtype == torch.float32 for tensor in reference.values()):
            return self._add_large(reference, scale)
        total = self.value()
        return {
            name: (total[name].mul_(scale).add_(tensor)).to(tensor.dtype)
            for name, tensor in reference.items()
        }

    def _add_large(self, reference: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        offset = self._offset
        result: dict[str, Tensor] = {}
        for group, steps in zip(self._groups, self._steps, strict=True):
            parts = steps.split([self._shapes[name].numel() for name in group])
            for name, part in zip(group, parts, strict=True):
                if name in reference:
                    before = reference[name].reshape(-1).numpy()
                    result[name] = torch.empty(self._shapes[name])
                    add_mean(
                        before, part.numpy(), offset, self.grid.step * scale, result[name].view(-1).numpy()
                    )
        return {name: result[name] for name in reference}


def _add_integers(total: Tensor, terms: Tensor) -> None:
    """total += terms. NumPy's addition is three times as fast: PyTorch's multiplies by its alpha first."""
    if total.device.type == "cpu":
        home = total.numpy()
        np.add(home, terms.numpy(), out=home)
    else:
        total.add_(terms)


def _group_names(like: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in order, small neighbours together: a model of many small layers then costs few operations."""
    groups: list[list[str]] = []
    filled = 0
    for name, tensor in like.items():
        if not groups or filled + tensor.numel() > _CHUNK:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.numel()
    return groups


def _flatten(tensors: list[Tensor]) -> Tensor:
    """All values one after the other; a single tensor is not copied."""
    rows = [tensor.detach().reshape(-1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _wrap(value: int) -> int:
    """value modulo 2^64, as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63


STATISTICS = ("running_mean", "running_var")


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running mean or variance.

    Statistics are averaged, and never extrapolated or corrected, because a variance below
    zero is no variance.
    """
    return name.rsplit(".", 1)[-1] in STATISTICS


def make_parameter_zeros(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros in the shapes of the parameters among arrays."""
    return {name: torch.zeros_like(tensor) for name, tensor in arrays.items() if not is_statistic(name)}
