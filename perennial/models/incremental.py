"""A network whose classifier grows with the tasks, and which of its tensors travel.

Shapes: x (B, ...) float32 input, features (B, d), logits (B, M). M: classes known so far.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from perennial.foundation.errors import StateError, suggest_nearest
from perennial.models.layers import LINEAR_SLOPE, draw_kaiming_uniform, empty_linear


class IncrementalModel(nn.Module):
    """Backbone and linear head; keys start with "backbone." and "head."."""

    def __init__(
        self,
        backbone: nn.Module,
        feature_width: int,
        num_classes: int,
        generator: np.random.Generator,
        *,
        dropout: float = 0.0,
    ) -> None:
        """backbone: (B, ...) -> (B, feature_width). generator: for the head's weights; its bias is 0."""
        super().__init__()
        self.backbone = backbone
        self.head = empty_linear(feature_width, num_classes)
        self.dropout = nn.Dropout(dropout) if dropout else None
        with torch.no_grad():
            self.head.weight.copy_(
                draw_kaiming_uniform((num_classes, feature_width), LINEAR_SLOPE, generator)
            )
            self.head.bias.zero_()

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    @property
    def feature_width(self) -> int:
        return self.head.in_features

    def features(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def classify(self, features: Tensor) -> Tensor:
        features = features if self.dropout is None else self.dropout(features)
        if not torch.is_autocast_enabled(features.device.type):
            return self.head(features)
        # in bfloat16 many logits would be equal, and the first of them, an old class, would be the answer
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features.float())

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))

    @torch.no_grad()
    def grow(self, num_classes: int, generator: np.random.Generator) -> None:
        """Add rows to the head up to num_classes. Old rows keep their bits.

        New weights are uniform in +-1/sqrt(d), new biases 0, so that no new class starts with a prior.
        generator: the stream of this task's rows. Raises StateError when num_classes is
        below the present number.
        """
        old = self.head
        if num_classes < old.out_features:
            raise StateError(
                f"head: found {old.out_features} classes, asked for {num_classes}; "
                f"allowed {old.out_features} or more, because classes are never taken back"
            )
        rows = draw_kaiming_uniform(
            (num_classes - old.out_features, old.in_features), LINEAR_SLOPE, generator
        )
        grown = empty_linear(old.in_features, num_classes)
        grown.weight.copy_(torch.cat([old.weight.cpu(), rows]))
        grown.bias.zero_()[: old.out_features].copy_(old.bias)
        grown.requires_grad_(old.weight.requires_grad)
        self.head = grown.to(old.weight.device)

    def begin_task(self, previous: Mapping[str, Tensor] | None) -> None:
        """Set what depends on the task before; by default nothing does.

        previous: complete_state of the global model at the end of the previous task; None at the first task.
        """

    def restructure(self, state: Mapping[str, Tensor]) -> None:
        """Add or remove submodules until they are those of `state`; by default there are none of the kind."""


def join_features(parts: Sequence[Tensor]) -> Tensor:
    """(B, sum of d_i): kinds of features (B, d_i) of the same samples, side by side.

    A module calls it as its attribute `join`, because several sites in one pass join theirs
    in another way (models/stacked.py).
    """
    return torch.cat(list(parts), dim=1)


def select_travelling(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that cross the wire in a round, detached and shared: trained parameters, float buffers.

    Integer buffers (BatchNorm's counter) do not travel, because a weighted mean would turn them into floats.
    Frozen parameters, and buffers of modules whose own parameters are all frozen, do not travel either, nor
    do buffers that no saved model has, such as a mask that follows from an image's size.
    """
    saved = model.state_dict().keys()
    tensors = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    for prefix, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffer.is_floating_point() and name in saved:
                tensors[name] = buffer.detach()
    return tensors


def complete_state(model: nn.Module) -> dict[str, Tensor]:
    """All float tensors of the model, travelling and frozen, detached, sharing the model's memory."""
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


def load_complete(model: IncrementalModel, state: Mapping[str, Tensor]) -> None:
    """Give model the tensors and structure of a complete_state.

    The model must have been built with as many classes as the state has head rows. Modules that only one of
    the two has (a dual backbone's old one) are added or removed; FlatParameters must then be built anew.
    The model uses the memory of state, with no copy: whoever trains the one writes to the other. Raises
    StateError naming the key that is missing, unknown, or of another shape or dtype.
    """
    model.restructure(state)
    check_state({key: value.shape for key, value in complete_state(model).items()}, state)
    model.load_state_dict(state, strict=False, assign=True)


@torch.no_grad()
def copy_state(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy state into targets, key by key. Raises StateError as check_state does."""
    check_state({key: target.shape for key, target in targets.items()}, state)
    for key, target in targets.items():
        target.copy_(state[key])


def check_state(shapes: Mapping[str, torch.Size], state: Mapping[str, Tensor]) -> None:
    """Raise StateError naming a key of state that is missing, unknown, or of another shape or dtype."""
    for key in state:
        if key not in shapes:
            raise StateError(f"tensor {key!r}: unknown to this model{suggest_nearest(key, shapes)}")
    for key, shape in shapes.items():
        if key not in state:
            raise StateError(f"tensor {key!r}: missing{suggest_nearest(key, state)}")
        tensor = state[key]
        if tensor.shape != shape or tensor.dtype != torch.float32:
            raise StateError(
                f"tensor {key!r}: found {tensor.dtype} {tuple(tensor.shape)}, "
                f"allowed torch.float32 {tuple(shape)}"
            )
