"""PP-FCIL's dual backbone: frozen features of the task before, trainable ones of this task, and a gate.

Varalakshmi et al. 2026 (doi 10.38124/ijisrt/26apr1499), after Xiao, Tang and Lu 2024
(doi 10.1109/TMLCN.2023.3344074).
Shapes: x (B, ...) float32 input; old, new, fused (B, d) features.
"""

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perennial.foundation.streams import stream
from perennial.models.incremental import IncrementalModel, complete_state, copy_state, join_features
from perennial.models.layers import LINEAR_SLOPE, draw_kaiming_uniform, empty_linear

_NEW = "backbone."
_OLD = "old_backbone."


class ChannelGate(nn.Module):
    """A weight in (0, 1) for each sample and channel; 1 takes the new feature, 0 the old one.

    sigmoid(W2 relu(W1 [old, new] + b1) + b2), hidden width max(8, 2 d // 16).
    """

    join = staticmethod(join_features)

    def __init__(self, feature_width: int, seed: int) -> None:
        super().__init__()
        hidden = max(8, 2 * feature_width // 16)
        self.seed = seed
        self.squeeze = empty_linear(2 * feature_width, hidden)
        self.excite = empty_linear(hidden, feature_width)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """First values: W2 = b2 = 0, hence exactly 0.5 for every input; W1 the same at every reset."""
        weight = self.squeeze.weight
        weight.copy_(
            draw_kaiming_uniform(tuple(weight.shape), LINEAR_SLOPE, stream(self.seed, "init", "gate"))
        )
        for zero in (self.squeeze.bias, self.excite.weight, self.excite.bias):
            zero.zero_()

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        return self.excite(F.relu(self.squeeze(self.join([old, new])))).sigmoid()


class DualBackboneModel(IncrementalModel):
    """From the second task on, a frozen old backbone and a new one, whose features a gate mixes.

    Their keys are "old_backbone." and "gate.". In the first task the model is the plain backbone and head.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_width: int,
        num_classes: int,
        generator: np.random.Generator,
        *,
        seed: int,
        dropout: float = 0.0,
    ) -> None:
        """seed: of the gate; see IncrementalModel for the others."""
        super().__init__(backbone, feature_width, num_classes, generator, dropout=dropout)
        self.seed = seed
        self.old_backbone: nn.Module | None = None
        self.gate: ChannelGate | None = None

    def features(self, x: Tensor) -> Tensor:
        return self.complete_features(x, self.backbone(x))

    def complete_features(self, x: Tensor, new: Tensor) -> Tensor:
        """(B, d) features where those of the new backbone are there already."""
        return new if self.old_backbone is None else self.fuse(self.compute_old_features(x), new)

    def compute_old_features(self, x: Tensor) -> Tensor:
        """(B, d) features of the backbone of the task before. Only from the second task on."""
        assert self.old_backbone is not None
        # an attack that differentiates the input must see this path too; parameters never get a gradient
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            return self.old_backbone(x)

    def fuse(self, old: Tensor, new: Tensor) -> Tensor:
        """gate * new + (1 - gate) * old, exactly new where old equals new. Only from the second task on."""
        assert self.gate is not None
        return torch.lerp(old, new, self.gate(old, new).to(new.dtype))

    def train(self, mode: bool = True) -> "DualBackboneModel":
        super().train(mode)
        if self.old_backbone is not None:
            self.old_backbone.eval()
        return self

    def begin_task(self, previous: Mapping[str, Tensor] | None) -> None:
        """Make the previous task's new backbone the old one, and reset the gate.

        previous: complete_state of the previous global model, None at the first task. FlatParameters must be
        built after this. Raises StateError naming the key when its backbone is not this model's.
        """
        super().begin_task(previous)
        self.restructure({} if previous is None else {_OLD: torch.empty(0)})
        if previous is None or self.old_backbone is None or self.gate is None:
            return
        values = {key.removeprefix(_NEW): value for key, value in previous.items() if key.startswith(_NEW)}
        copy_state(complete_state(self.old_backbone), values)
        self.gate.reset()

    def restructure(self, state: Mapping[str, Tensor]) -> None:
        """Add an old backbone and a gate if `state` has an old backbone, and remove them if not."""
        if not any(key.startswith(_OLD) for key in state):
            self.old_backbone = self.gate = None
        elif self.old_backbone is None:
            self.old_backbone = deepcopy(self.backbone).requires_grad_(False).eval()
            self.gate = ChannelGate(self.feature_width, self.seed).to(self.head.weight.device)
