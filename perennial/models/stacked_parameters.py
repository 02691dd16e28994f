"""The trained parameters of K sites in one vector: tensor by tensor, and in each tensor site by site.

A step, a correction or a clip is one operation on the vector, and each layer's weights are one block of it
that a grouped convolution or a batched product takes as it is. Fewer sites are the first part of each block.

K: sites. T: elements of one site's trained parameters.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class StackedParameters:
    """Weights and gradients of K sites.

    vector, gradient: (K * T,). leaves: by name, views of vector that autograd accumulates into gradient:
    (K * rows, ...) unless keep_apart gave (K, ...). sizes: of the sites' batches in this step, and
    generators: for what is drawn in it; both are for dropout.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], count: int, like: Tensor) -> None:
        """Zeros for `count` sites. shapes: one site's parameters, in order. like: gives type and device."""
        self.count = count
        self.leaves: dict[str, Tensor] = {}
        self.sizes: Sequence[int] = ()
        self.generators: Sequence[torch.Generator] = ()
        self._lengths = [shape.numel() for shape in shapes.values()]
        self._shapes = {name: (1, tuple(shape)) for name, shape in shapes.items()}
        self.vector = like.new_zeros(count * self.length)
        self.gradient = torch.zeros_like(self.vector)
        self._whole = count, self.vector, self.gradient

    @property
    def length(self) -> int:
        """T, the number of values of one site."""
        return sum(self._lengths)

    def keep_apart(self, name: str, shape: tuple[int, ...]) -> None:
        """Give a leaf the shape (K, *shape), from the next settle() on."""
        self._shapes[name] = (0, shape)

    def settle(self) -> None:
        """Make the leaves views of the present vector and gradient."""
        weights, gradients = self.blocks(self.vector), self.blocks(self.gradient)
        for (name, (merged, shape)), weight, gradient in zip(
            self._shapes.items(), weights, gradients, strict=True
        ):
            whole = (self.count * shape[0], *shape[1:]) if merged else (self.count, *shape)
            leaf = weight.view(whole).requires_grad_()
            leaf.grad = gradient.view(whole)
            self.leaves[name] = leaf

    def begin_again(self) -> None:
        """Hold all sites again, in the same memory, with zero gradient."""
        self.count, self.vector, self.gradient = self._whole
        self.gradient.zero_()
        self.sizes = self.generators = ()
        self.settle()

    def blocks(self, vector: Tensor) -> list[Tensor]:
        """Split vector (K * T,) into one (K, n) view for each tensor."""
        parts = vector.split([self.count * length for length in self._lengths])
        return [part.view(self.count, -1) for part in parts]

    def gathered(self, rows: Tensor) -> Tensor:
        """Reorder sites' vectors (K, T) as this vector is ordered: (K * T,), tensor by tensor."""
        return torch.cat([part.reshape(-1) for part in rows.split(self._lengths, dim=1)])

    def rows(self, vector: Tensor) -> Tensor:
        """Reorder vector (K * T,) as one vector for each site: (K, T), a copy."""
        return torch.cat(self.blocks(vector), dim=1)

    def load(self, rows: Tensor) -> None:
        """Copy the sites' vectors, (K, T), into this vector."""
        self.vector.copy_(self.gathered(rows))

    def keep(self, count: int, beside: Sequence[Tensor]) -> list[Tensor]:
        """Drop all but the first `count` sites, and return their part of other vectors (K * T,)."""

        def first(vector: Tensor) -> Tensor:
            return torch.cat([block[:count].reshape(-1) for block in self.blocks(vector)])

        self.vector, self.gradient, *others = [first(each) for each in (self.vector, self.gradient, *beside)]
        self.count = count
        self.generators = self.generators[:count]
        self.settle()
        return others

    def block(self, name: str, vector: Tensor) -> Tensor:
        """The (K, n) view of vector (K * T,) that holds one tensor."""
        return self.blocks(vector)[list(self._shapes).index(name)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join kinds of features (B, K * d_i) to (B, K * sum d_i), each site's own side by side."""
        batch = len(parts[0])
        return torch.cat([part.view(batch, self.count, -1) for part in parts], dim=2).view(batch, -1)
