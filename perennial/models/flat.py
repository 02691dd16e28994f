"""One vector for a whole model, so that a step, a clip, a noise draw or an update is one tensor operation.

P: elements of all travelling tensors. T: elements of those that are trained, T <= P.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from perennial.foundation.errors import StateError
from perennial.models.incremental import check_state, select_travelling

LARGE = 1 << 22
"""Values of a model from which memory counts more than the time that making it takes."""


class FlatParameters:
    """Re-homes a model's travelling tensors in one float32 vector; the model goes on, on views of it.

    vector (P,): trainable parameters in the model's order, then float buffers, each in row-major order
    whatever the memory format was, so that vectors of different sites can be added. With channels_last the
    weights of 2-D convolutions lie as (O, H, W, C), as convolutions on channels_last inputs want them.
    trainable (T,): view of the parameters, whose .grad is gradient; an optimiser over [trainable] steps all.
    gradient (T,): the parameters' .grad are views of it, into which autograd accumulates. It is made when it
    is first asked for. Clear it with gradient.zero_(); never set a .grad to None, nor call backward with
    create_graph=True, which replaces it.

    Build it last: moving or growing the model, or converting it to channels_last, gives its parameters new
    memory (load notices). Integer buffers and frozen parameters stay where they are.
    """

    def __init__(self, model: nn.Module, channels_last: bool = False) -> None:
        """Move the model's tensors. Raises StateError if one that travels is not float32, or none travels."""
        tensors = select_travelling(model)
        self.shapes: dict[str, torch.Size] = {key: tensor.shape for key, tensor in tensors.items()}
        self.keys: tuple[str, ...] = tuple(tensors)
        if not tensors:
            raise StateError(
                "model: found no trainable parameter and no float buffer; nothing can be trained"
            )
        check_state(self.shapes, tensors)
        self._sizes = [tensor.numel() for tensor in tensors.values()]
        self._last = {key for key, shape in self.shapes.items() if channels_last and len(shape) == 4}
        self.vector = torch.cat([self._row(key, tensor) for key, tensor in tensors.items()])
        self._model = model
        parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.trainable = self.vector[: sum(value.numel() for value in parameters.values())]
        self.trainable_keys: tuple[str, ...] = tuple(parameters)
        self._gradient: Tensor | None = None
        homes = parameters | {name: value for name, value in model.named_buffers() if name in self.shapes}
        views = self.view_tensors(self.vector)
        for name, view in views.items():
            homes[name].data = view
        self._homes = [(name, attrgetter(name), view.storage_offset()) for name, view in views.items()]
        self._parameters = parameters
        self.stacks: dict[int, Any] = {}
        """By number of sites: this model for several of them, as models/stacked.py makes it."""

    @property
    def gradient(self) -> Tensor:
        """(T,) memory of the gradient, made at the first use: zero, or what a backward pass left before."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.trainable)
            self.trainable.grad = self._gradient
            for key, view in self.view_trained(self._gradient).items():
                parameter = self._parameters[key]
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                parameter.grad = view
        return self._gradient

    def forget_gradient(self) -> None:
        """Free the gradient's memory until it is next used."""
        self._gradient = self.trainable.grad = None
        for parameter in self._parameters.values():
            parameter.grad = None

    def forget(self) -> None:
        """Free all memory until `load` fills the vector again; until then the model must not be used."""
        self.forget_gradient()
        self.vector.untyped_storage().resize_(0)

    @property
    def large(self) -> bool:
        """Whether the vector is so large that unused memory should be freed."""
        return len(self.vector) >= LARGE

    def view_tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors inside vector (P,), without a copy. Raises StateError on another size."""
        if vector.shape != self.vector.shape:
            raise StateError(f"vector: found shape {tuple(vector.shape)}, allowed {tuple(self.vector.shape)}")
        parts = vector.split(self._sizes)
        return {key: self._view(key, part) for key, part in zip(self.keys, parts, strict=True)}

    def view_trained(self, vector: Tensor) -> dict[str, Tensor]:
        """The trained tensors inside vector (T,), without a copy."""
        parts = vector.split(self._sizes[: len(self.trainable_keys)])
        return {key: self._view(key, part) for key, part in zip(self.trainable_keys, parts, strict=True)}

    def flatten_trained(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new vector (T,) on this model's device with the trained tensors, in float32.

        Raises StateError naming a tensor of another shape, as one that was kept before classes came.
        """
        for key in self.trainable_keys:
            if key in tensors and tensors[key].shape != self.shapes[key]:
                raise StateError(
                    f"tensor {key!r}: found {tuple(tensors[key].shape)}, allowed {tuple(self.shapes[key])}; "
                    "perennial.grown gives a tensor that was kept the rows of new classes"
                )
        return torch.cat([self._row(key, tensors[key]).to(self.vector) for key in self.trainable_keys])

    def to_row_major(self, rows: Tensor) -> Tensor:
        """(K, P) or (K, T) vectors with every tensor in row-major order."""
        return self._permute(rows, (0, 3, 1, 2), lambda shape: (shape[0], *shape[2:], shape[1]))

    def as_stored(self, rows: Tensor) -> Tensor:
        """(K, P) or (K, T) row-major vectors in this model's own memory order: the inverse of row_major."""
        return self._permute(rows, (0, 2, 3, 1), tuple)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new vector (P,) on this model's device with the named tensors.

        Raises StateError naming the key that is missing, unknown, or of another shape or dtype.
        """
        return torch.cat(self._list_rows(tensors))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into the model.

        Raises StateError as flatten does, and when the model's parameters no longer live in this vector; the
        model is unchanged.
        """
        parts = self._list_rows(tensors)
        memory = self.vector.untyped_storage()
        if not memory.nbytes():
            memory.resize_(self.vector.nbytes)
        storage = memory.data_ptr()
        for key, current, home in self._homes:
            now = current(self._model)
            if now.untyped_storage().data_ptr() != storage or now.storage_offset() != home:
                raise StateError(
                    f"tensor {key!r}: no longer lives in this vector; build FlatParameters after moving, "
                    "converting or growing the model"
                )
        if any(part.untyped_storage().data_ptr() == storage for part in parts):
            self.vector.copy_(torch.cat(parts))
        else:
            torch.cat(parts, out=self.vector)

    def _list_rows(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The named tensors, checked, each as one row on this model's device, in the vector's order."""
        check_state(self.shapes, tensors)
        return [self._row(key, tensors[key]).to(self.vector.device) for key in self.keys]

    def _row(self, key: str, tensor: Tensor) -> Tensor:
        return (tensor.permute(0, 2, 3, 1) if key in self._last else tensor).reshape(-1)

    def _view(self, key: str, row: Tensor) -> Tensor:
        shape = self.shapes[key]
        if key not in self._last:
            return row.view(shape)
        return row.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)

    def _permute(
        self, rows: Tensor, order: Sequence[int], stored: Callable[[torch.Size], tuple[int, ...]]
    ) -> Tensor:
        if not self._last:
            return rows
        keys = self.keys if rows.shape[1] == len(self.vector) else self.trainable_keys
        parts = rows.split(self._sizes[: len(keys)], dim=1)
        dims = 0, *(place + 1 for place in order)
        return torch.cat(
            [
                part.view(len(rows), *stored(self.shapes[key])).permute(dims).reshape(len(rows), -1)
                if key in self._last
                else part
                for key, part in zip(keys, parts, strict=True)
            ],
            dim=1,
        )
