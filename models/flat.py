"""One vector for a whole model, so that a step, a clip, a noise draw or an update is one tensor operation.

P: elements of all travelling tensors. T: elements of those that are trained, T <= P.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor, nn

from perennial.foundation.errors import StateError
from perennial.models.incremental import IncrementalModel, check_state, travelling


class FlatParameters:
    """Re-homes a model's travelling tensors in one float32 vector; the model goes on, on views of it.

    vector (P,): trainable parameters in the model's order, then float buffers, each in row-major order
    whatever the memory format was, so that vectors of different sites can be added.
    trainable (T,): view of the parameters, whose .grad is gradient; an optimiser over [trainable] steps the
    model.
    gradient (T,): the parameters' .grad are views of it, into which autograd accumulates. Clear it with
    gradient.zero_(); never set a .grad to None, nor call backward with create_graph=True, which replaces it.

    Build it last: moving or growing the model, or converting it to channels_last, gives its parameters new
    memory (load notices). For channels_last convert the inputs only: convolutions follow the layout of their
    input, and weights stay row-major. Integer buffers and frozen parameters stay where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises StateError when a travelling tensor is not float32, or there is none."""
        tensors = travelling(model)
        self.shapes: dict[str, torch.Size] = {key: tensor.shape for key, tensor in tensors.items()}
        self.keys: tuple[str, ...] = tuple(tensors)
        if not tensors:
            raise StateError(
                "model: found no trainable parameter and no float buffer; nothing can be trained"
            )
        check_state(self.shapes, tensors)
        self._sizes = [tensor.numel() for tensor in tensors.values()]
        self._starts = dict(zip(self.keys, accumulate(self._sizes, initial=0), strict=False))
        self.vector = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        self._model = model
        parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.trainable = self.vector[: sum(value.numel() for value in parameters.values())]
        self.trainable_keys: tuple[str, ...] = tuple(parameters)
        self.gradient = torch.zeros_like(self.trainable)
        self.trainable.grad = self.gradient
        homes = parameters | {name: value for name, value in model.named_buffers() if name in self.shapes}
        views = self.views(self.vector)
        for name, view in views.items():
            homes[name].data = view
        self._homes = [(name, attrgetter(name), view.data_ptr()) for name, view in views.items()]
        gradients = self.gradient.split(self._sizes[: len(parameters)])
        for part, parameter in zip(gradients, parameters.values(), strict=True):
            parameter.grad = part.view(parameter.shape)
        self._frozen = self._frozen_slices(model.frozen_rows if isinstance(model, IncrementalModel) else 0)
        self._held: tuple[slice, ...] = ()

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors inside vector (P,), without a copy. Raises StateError on another size."""
        if vector.shape != self.vector.shape:
            raise StateError(f"vector: found shape {tuple(vector.shape)}, allowed {tuple(self.vector.shape)}")
        parts = vector.split(self._sizes)
        return {key: part.view(shape) for (key, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new vector (P,) on this model's device with the named tensors.

        Raises StateError naming the key that is missing, unknown, or of another shape or dtype.
        """
        return torch.cat(self._rows(tensors))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into the model.

        Raises StateError as flatten does, and when the model's parameters no longer live in this vector; the
        model is unchanged.
        """
        parts = self._rows(tensors)
        for key, current, home in self._homes:
            if current(self._model).data_ptr() != home:
                raise StateError(
                    f"tensor {key!r}: no longer lives in this vector; build FlatParameters after moving, "
                    "converting or growing the model"
                )
        storage = self.vector.untyped_storage().data_ptr()
        if any(part.untyped_storage().data_ptr() == storage for part in parts):
            self.vector.copy_(torch.cat(parts))
        else:
            torch.cat(parts, out=self.vector)

    def keep_frozen_rows(self, before: Tensor) -> None:
        """Give the head's frozen rows the values that they have in before (P,). Call it after each step.

        It undoes weight decay and momentum as well as gradients. No-op for a model without frozen rows.
        """
        for frozen in self._frozen:
            self.vector[frozen].copy_(before[frozen])

    def hold(self, keys: Iterable[str]) -> None:
        """Name the tensors that keep_held restores; earlier names are forgotten.

        Raises StateError naming a tensor that the model does not have.
        """
        held = []
        for key in keys:
            if key not in self._starts:
                raise StateError(f"tensor {key!r} is to be held, but the model has no such tensor")
            start = self._starts[key]
            held.append(slice(start, start + self.shapes[key].numel()))
        self._held = tuple(held)

    def keep_held(self, before: Tensor) -> None:
        """Give the held tensors the values that they have in before (P,). Call it after each step."""
        for held in self._held:
            self.vector[held].copy_(before[held])

    def clear_held(self, update: Tensor) -> None:
        """Set the entries of update (P,) that belong to held tensors to exactly 0."""
        for held in self._held:
            update[held].zero_()

    def _rows(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The named tensors, checked, each as one row on this model's device, in the vector's order."""
        check_state(self.shapes, tensors)
        return [tensors[key].reshape(-1).to(self.vector.device) for key in self.keys]

    def _frozen_slices(self, rows: int) -> tuple[slice, ...]:
        """Where the first rows of the head's weight and bias lie in the vector."""
        if not rows:
            return ()
        width = self.shapes["head.weight"][1]
        weight, bias = self._starts["head.weight"], self._starts["head.bias"]
        return slice(weight, weight + rows * width), slice(bias, bias + rows)
